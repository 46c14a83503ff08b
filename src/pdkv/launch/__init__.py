"""The one place that spawns processes: fork server, supervision, life lines."""
