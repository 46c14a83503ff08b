"""The kit's engines, hosts and worlds: what its cases and its benchmark run connectors in."""
