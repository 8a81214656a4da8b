"""Exports of runs to other tools: OpenTelemetry, MLflow. Each module needs the extra of its name."""
