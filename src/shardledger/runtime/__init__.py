"""What happens now? Hooks make events, the schedule turns them into actions, the executor performs them."""
