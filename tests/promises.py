"""What flash-qsa promises, as data: the behaviour of QSA's best known owner, and published faults.

`scope` says where a line applies: the library itself ("core"), the vLLM integration ("vllm"), or
both. `needs_gpu` marks what only a GPU can show; such a line counts as covered by a test in
tests/gpu, which the ordinary CI does not run.
"""

from __future__ import annotations

from typing import NamedTuple


class Promise(NamedTuple):
    """One line: where it applies, what it says, and whether only a GPU can show it."""

    scope: str
    text: str
    needs_gpu: bool = False


PARITY = {
    "P01": Promise("both", "Works on a paged cache only; refuses other activation dtypes by name"),
    "P02": Promise("both", "Index heads, dims, budget and ratio come from the configuration"),
    "P03": Promise("both", "One joint index projection without bias, whole on every rank"),
    "P04": Promise("both", "Index norms are zero-centred RMSNorm with the model's epsilon"),
    "P05": Promise("both", "Index cache in the activation dtype or FP8 without scales"),
    "P06": Promise("both", "Raw keys of the open group sit in a ring, mRoPE positions behind them"),
    "P07": Promise("both", "One compressed key a group, paged by the main cache's table"),
    "P08": Promise("both", "Packed selection: budget + ratio - 1 tokens, padding, then the count"),
    "P09": Promise("both", "Without metadata rows are empty; a reused buffer is left alone"),
    "P10": Promise("both", "Padded rows behind the real ones are ignored everywhere"),
    "P11": Promise("both", "Positions of every accepted rank become one canonical form"),
    "P12": Promise("both", "Where fused preparation does not apply, the unfused path answers"),
    "P13": Promise("both", "One launch prepares queries, keys, values, ring and compressed keys"),
    "P14": Promise("vllm", "Fused mode refuses a missing projection or slot mapping"),
    "P15": Promise("both", "The separate ops agree with the fused one"),
    "P16": Promise("both", "A group rotates at its first token's position, from step or ring"),
    "P17": Promise("both", "Draft steps reuse a selection while both caches move on"),
    "P18": Promise("both", "A selection buffer of another shape is refused"),
    "P19": Promise("both", "Decode requests lead the batch and share one query length"),
    "P20": Promise("both", "Prefill requests follow; their offsets may start inside a tensor"),
    "P21": Promise("both", "Expansion: complete blocks, then the open group, then the count"),
    "P22": Promise("both", "Raw and compressed metadata that disagree are refused"),
    "P23": Promise("vllm", "Cache dtypes, parallelism and rope kinds out of scope are refused"),
    "P24": Promise("both", "Heads divide by the ranks; few KV heads are replicated"),
    "P25": Promise("both", "Head dim from the configuration, softmax scale from the head dim"),
    "P26": Promise("both", "A sigmoid gate beside each query head; row-parallel output"),
    "P27": Promise("vllm", "Under ModelOpt FP4 the attention projections stay as they are"),
    "P28": Promise("both", "Cache dtype by layer; rope from the model, shared by all heads"),
    "P29": Promise("both", "Main queries and keys are normed before they rotate"),
    "P30": Promise("both", "Norm, rotation and gate fuse for NeoX rotary in 16 bits"),
    "P31": Promise("both", "Fused FP8 stores follow the device's capability"),
    "P32": Promise(
        "vllm", "The index projection is packed and loaded by shard; rank fields survive"
    ),
    "P33": Promise("both", "One int32 selection buffer a layer, count beside its row"),
    "P34": Promise("vllm", "A layer registers by name; a second of the same name is refused"),
    "P35": Promise("both", "Cache specifications give exactly the bytes that are allocated"),
    "P36": Promise("vllm", "A profiling run touches the peak workspace and zeroes the output"),
    "P37": Promise("both", "An unbound main cache is refused"),
    "P38": Promise("both", "The layer runs eagerly, captured and compiled"),
    "P39": Promise("both", "Decode or prefill profile steers tuning, never a result"),
    "P40": Promise("vllm", "What the attention backend says of itself"),
    "P41": Promise("both", "Output zeroed first; FP8 by type or by bytes; dtypes refused by name"),
    "P42": Promise("both", "Separate and fused writers store the same bytes"),
    "P43": Promise("both", "Output quantisation, ALiBi, sinks and windows are refused by name"),
    "P44": Promise("core", "Tile choice is a pure function; never no split, never too many"),
    "P45": Promise("core", "Compression over step and ring, and everything that it refuses"),
    "P46": Promise("core", "Sparse attention on pages: strides, gate, empty rows, invalid ids"),
    "P47": Promise("core", "Row stores skip slots outside the cache and check shapes"),
    "P48": Promise("core", "Warm-up lists and compiles everything that serving can reach"),
    "P49": Promise("both", "Index rope is the main attention's own table"),
}

BUGS = {
    "O-01": Promise("core", "Concentrated scores overflow a threshold bucket"),
    "O-02": Promise("core", "Winners lost among values that share a histogram bin"),
    "O-03": Promise("core", "Ties at the cut break differently in each run"),
    "O-04": Promise("core", "NaN scores become huge indices"),
    "O-05": Promise("core", "A padded row of length 0 or -1 hangs the selector"),
    "O-06": Promise("core", "A query selects the block that it is still inside"),
    "O-07": Promise("core", "The fallback path forgets the causal bound"),
    "O-08": Promise("core", "A cached prefix is not scored in full"),
    "O-09": Promise("core", "Two expansions bound blocks and tail differently"),
    "O-10": Promise("core", "Score without ReLU, or maxima over heads instead of their sum"),
    "O-11": Promise("core", "Index keys and queries are not rotated"),
    "O-12": Promise("core", "Forced sink blocks, and a cliff at the budget"),
    "O-13": Promise("core", "Empty rows give NaN in the merge of splits"),
    "O-14": Promise("core", "Empty rows are skipped and left unwritten"),
    "O-15": Promise("core", "Junk in unused cells reaches the answer"),
    "O-16": Promise("core", "A partial last tile gives weight to keys that are not there"),
    "O-17": Promise("core", "A ring of one group aliases under a wider draft window"),
    "O-18": Promise("core", "Stale ring rows after rejected drafts"),
    "O-19": Promise("core", "Draft steps reuse another layer's or an older selection"),
    "O-20": Promise("core", "State follows the batch row instead of the request"),
    "O-21": Promise("core", "A replayed graph differs from eager", needs_gpu=True),
    "O-22": Promise("core", "A cached prefix that ends inside a group"),
    "O-23": Promise("core", "Decode rows mixed into a prefill batch"),
    "O-24": Promise("core", "One token left after a cache hit"),
    "O-25": Promise("core", "A snapshot restores K and V without the index state"),
    "O-26": Promise("core", "Pages moved out and back keep stale compressed keys"),
    "O-27": Promise("core", "A cache without its index part fails at the budget's edge"),
    "O-28": Promise("core", "Prefix reuse refused at lengths that are no multiple of a page"),
    "O-29": Promise("core", "A copied sequence keeps somebody else's index keys"),
    "O-30": Promise("core", "Index cache and attention cache lose step"),
    "O-31": Promise("core", "A reused slot remembers its former request"),
    "O-32": Promise("core", "Batch and sequence axes are mixed up"),
    "O-33": Promise("core", "Page offsets wrap at 32 bits"),
    "O-34": Promise("core", "A move takes pages for tokens"),
    "O-35": Promise("core", "Page size in tokens taken for compressed rows"),
    "O-36": Promise("core", "Slot -1 writes the last cell"),
    "O-37": Promise("core", "A ring addressed like a paged cache"),
    "O-38": Promise("core", "A kernel runs on a device that it is wrong on"),
    "O-39": Promise("core", "Metadata changes while kernels read it", needs_gpu=True),
    "O-40": Promise("core", "Writer and reader disagree on the layout"),
    "O-41": Promise("core", "FP8 keys meet a 16-bit query"),
    "O-42": Promise("core", "FP8 scales baked in, or values that overflow to NaN"),
    "O-43": Promise("core", "Cards without e4m3 or without BF16"),
    "O-44": Promise("core", "A tile that does not fit a smaller card's shared memory"),
    "O-45": Promise("core", "No portable kernel is found for a device"),
    "O-46": Promise("core", "A grid dimension past its limit at the native context"),
    "O-47": Promise("core", "Tokens of an image collapse into one group"),
    "O-48": Promise("core", "A rope table shorter than the context, or YaRN left out"),
    "O-49": Promise("core", "An adapter on the index projection is ignored"),
    "O-50": Promise("core", "The layer type is spelled another way"),
    "O-51": Promise("core", "Budgets and ratios other than the usual"),
    "O-52": Promise("core", "The score buffer grows with every chunk"),
    "O-53": Promise("core", "Work that grows with the context"),
    "O-54": Promise("core", "Masks of queries times keys"),
    "O-55": Promise("core", "Index cache not counted, or counted twice"),
    "O-56": Promise("core", "Errors larger than plain attention's within the budget"),
}
