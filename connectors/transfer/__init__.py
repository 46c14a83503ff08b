"""Common to all transports: planning, units and block runs, gathering copies, transfer jobs and their worker."""
