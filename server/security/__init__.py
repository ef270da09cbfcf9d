"""Authentication, authorization, sessions, rate limits and the audit log."""
