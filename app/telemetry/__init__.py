"""What is told about requests: the timeline (pure), spans, metrics. Reads the timeline, measures nothing itself."""
