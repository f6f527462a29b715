"""Rules about files: functions from a workspace root to a list of complaints (empty when the rule holds)."""
