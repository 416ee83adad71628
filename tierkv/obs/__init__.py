"""What people and monitoring see: metrics, health, logs."""
