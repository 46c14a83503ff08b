"""The conformance kit: drives a connector through its public interface and tells whether it keeps every contract."""
