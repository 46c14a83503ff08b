"""Everything that spawns processes: fork server, supervision, lifelines."""
