"""The suite on a busy host, again and again: which tests fail while the product is right."""
