"""The decision: from an ext_proc stream to request facts, a pick, a reservation and its release.

Everything here except `service` and `health` is pure: it takes a clock and plain data and never
touches a socket.
"""
