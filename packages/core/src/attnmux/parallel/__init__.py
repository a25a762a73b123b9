"""Context parallelism: its groups, and merges of partial attention by log-sum-exp.

With decode context parallelism (DCP) the key/value cache of a request is spread over the ranks
of a group; each rank attends to its own keys and the partial results are merged by their
log-sum-exp. Prefill context parallelism (PCP) spreads the query tokens of a prefill.
"""

from __future__ import annotations

from attnmux.parallel.groups import (
    ContextParallelGroup,
    context_parallel_place,
    destroy_context_parallel,
    get_dcp_group,
    get_pcp_group,
    init_context_parallel,
    use_context_parallel_groups,
)
from attnmux.parallel.merge import (
    MergeScheme,
    merge_across_ranks,
    merge_attn_states,
    merge_states,
)

__all__ = [
    "ContextParallelGroup",
    "MergeScheme",
    "context_parallel_place",
    "destroy_context_parallel",
    "get_dcp_group",
    "get_pcp_group",
    "init_context_parallel",
    "merge_across_ranks",
    "merge_attn_states",
    "merge_states",
    "use_context_parallel_groups",
]
