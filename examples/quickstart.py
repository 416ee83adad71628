import tierkv

prompt = list(range(1, 101))
spec = tierkv.KVSpec(model="quickstart", layers=2, kv_heads=2, head_dim=64)

with tierkv.connect() as cache:
    namespace = cache.namespace(spec)
    for time in ("first", "second"):
        sequence = namespace.begin(prompt)  # the longest cached prefix, pinned
        cached = sequence.cached_tokens
        print(f"{time} time: {cached} of {len(prompt)} tokens are cached")
        sequence.reserve(len(prompt) - cached)  # slots in the pool for the rest
        fresh = sequence.block_table[cached // spec.block_tokens :]
        namespace.pool[fresh] = 0  # a model writes its keys and values here
        sequence.append(prompt[cached:])  # full blocks can be found from now on
        sequence.end()
