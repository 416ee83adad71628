"""The worker's side: connect, map the arena, begin and end sequences."""
