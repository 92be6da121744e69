"""What the ranks report about themselves, collected over the network and handed on as plain data."""
