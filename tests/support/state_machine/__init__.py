"""Host, stand-in forward pass and defects for the random-schedule tests of the hand-off state machine."""
