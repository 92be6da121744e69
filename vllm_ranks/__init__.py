"""The ranks: what they report about themselves (`reports`) and the embedded engine (`engine`)."""
