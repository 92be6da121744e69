"""What an operator touches: configuration, lifecycle, Envoy rendering, admin API, telemetry and the CLI."""
