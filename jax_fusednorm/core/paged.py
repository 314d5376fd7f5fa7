"""A KV cache in pages, and the places of a ragged batch's tokens in it: what hostile offsets, lengths and tables mean is said here."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Keys and values of B sequences in pages, for every layer; a pytree.

    Position p of sequence b lies in row p % page_size of page page_table[b, p // page_size].

    Fields:
      pages: [num_pages, 2, num_layers, page_size, Hkv, D] in float32, bfloat16 or float16: on the second axis keys, then values; an axis
        of 1 holds keys alone.
      page_table: int32 [B, max_pages]. An id that is no page, such as -1 or num_pages, marks an entry that is not in use.
      lengths: int32 [B], how many tokens of each sequence were stored before this step. Advance them once a step, after its last layer:
        `dataclasses.replace(cache, lengths=cache.lengths + jnp.diff(input_row_offsets))`.
    """

    pages: jax.Array
    page_table: jax.Array
    lengths: jax.Array


jax.export.register_pytree_node_serialization(
    PagedKVCache, serialized_name="jax_fusednorm.PagedKVCache", serialize_auxdata=lambda fields: b"", deserialize_auxdata=lambda fields: (),
    from_children=lambda _, children: PagedKVCache(*children))


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a batch's T tokens lie, int32 [T]: positions, -1 for padding; and pages, num_pages for none, with their rows."""

    positions: jax.Array
    page: jax.Array
    layer: jax.Array
    row: jax.Array

    def take(self, pages, kind):
        """[T, Hkv, D], the keys (kind 0) or values (1)."""
        return pages.at[self.page, kind, self.layer, self.row].get(mode="clip")

    def put(self, pages, kind, rows):
        """The pages with [T, Hkv, D] stored."""
        return pages.at[self.page, kind, self.layer, self.row].set(rows, mode="drop")


def places(tokens, offsets, lengths, page_table, layer, pages, max_positions):
    """The Places of tokens 0 to `tokens` - 1.

    Offsets count as their running maximum, clipped to [0, tokens]: a token outside every sequence is padding. A position that is negative,
    beyond int32 or not below max_positions makes padding too. Where the position has no entry in the table, the entry is no page, or
    the layer is none, the token has its position, but no row.
    """
    sequences, entries = page_table.shape
    num_pages, _, layers, page_size = pages.shape[:4]
    bounds = jnp.clip(jax.lax.cummax(offsets), 0, tokens)
    token = jnp.arange(tokens, dtype=jnp.int32)
    # bounds only grow, so counting is searching; of sequences that start at one token the last one has it
    sequence = jnp.sum(bounds <= token[:, None], axis=-1, dtype=jnp.int32) - 1
    inside = (sequence >= 0) & (sequence < sequences)
    # one sequence and one entry more, which are none: no index below is out of bounds, and neither table is empty
    lengths, page_table = jnp.pad(lengths, (0, 1)), jnp.pad(page_table, (0, 1), constant_values=-1)
    position = lengths[sequence] + (token - bounds[sequence])  # negative where it overflows
    known = inside & (position >= 0) & (position < max_positions)
    position = jnp.where(known, position, -1)
    page = page_table[sequence, jnp.minimum(position // page_size, entries)]
    stored = known & (page >= 0) & (page < num_pages) & (layer >= 0) & (layer < layers)
    # to jnp an index of -1 is the last page
    return Places(position, jnp.where(stored, page, num_pages), layer, position % page_size)
