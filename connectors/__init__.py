"""The KVConnector interface, its views, transfer planning, the registry and the backends."""
