"""Tools around the engine: planner, compile gate, tuner, device check, benchmarks, load client."""
