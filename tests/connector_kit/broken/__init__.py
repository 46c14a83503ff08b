"""Connectors with one defect each, made from shipped ones: what the conformance kit must find."""
