"""What the HTTP port serves: metrics, and the dashboard."""
