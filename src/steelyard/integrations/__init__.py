"""Where runs go beside their own directory: OpenTelemetry, MLflow. Each module needs the extra of its name."""
