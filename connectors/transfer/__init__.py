"""What every transport shares: planning, units and block runs, gathering copies, transfer jobs and their worker."""
