// What a launch tells a kernel beside its buffers: plain structs of 4-byte members, read by the handlers and by every kernel target.
#pragma once

struct NormParams {
  uint rows;
  uint width;
  float epsilon;
  float scale_offset;
};

struct GatedGroupNormParams {
  uint rows;
  uint groups;      // of a row
  uint width;       // of a group
  uint blocks;      // the rows are cut into this many, one team for each group of each; forward: blocks of one row
  uint gate_width;  // of a row of the gate, which has the columns gate_start ... gate_start + groups * width
  uint gate_start;
  uint gate_aligned;  // every group of the gate starts at a multiple of a pack's alignment
  uint silu;          // the gate's activation: 1 silu, 0 sigmoid
  float epsilon;
};

struct NormDerivativeParams {
  uint rows;
  uint width;
  uint teams;  // cotangent: the rows are cut into this many blocks, one team each
  float epsilon;
};

enum { no_scale, float_scale, storage_scale };
enum { float_copy, bfloat_copy, half_copy };

struct HeadNormRopeParams {
  uint tokens;
  uint sequence;     // tokens that a head-major result holds side by side
  uint heads;        // of x, and of k
  uint k_heads;
  uint width;
  uint x_stride;     // elements from a token of x to the next, and where its heads begin among them
  uint x_start;
  uint k_stride;
  uint k_start;
  uint lanes;        // that share a head
  uint at_once;      // heads, in one walk of a team
  uint x_walks;      // of x's heads, and then of k's
  uint k_walks;
  uint parts;        // teams that share a token
  uint pairs;        // that rotate
  uint first;        // channel that does
  uint distance;     // between the channels of a pair
  uint interleaved;  // pairs start at every second channel, not at every one
  uint table;        // the angles are cosines and sines, not turns a position
  uint table_rows;
  uint scale;        // what there is
  uint copies;
  uint copy_types;   // two bits each
  uint head_major;   // one bit each
  float epsilon;
  float scale_offset;
};

struct PagedHeadsParams {
  HeadNormRopeParams heads;  // of q, its x, and of k; v has as many as k
  uint v_stride;
  uint v_start;
  uint has_k;                // else it lies in its slots
  uint has_v;
  uint sequences;
  uint table_width;          // pages that a sequence may have
  uint pages;                // that there are
  uint sides;                // of a page: k and v, or k alone
  uint layers;
  uint page_size;            // tokens
};

enum { most_gaps = 4 };

struct HeadCotangentParams {
  HeadNormRopeParams heads;
  uint x_teams;  // that the heads of x in all tokens are cut into, and those of k
  uint k_teams;
  uint other_teams;  // that the tokens are cut into for the rest of a projection
  uint packed;       // x and k are columns of one projection, and so are their cotangents
  uint v_start;      // its columns that v's cotangent is copied to
  uint v_columns;
  uint gap_start[most_gaps];  // its columns that are of nothing
  uint gap_columns[most_gaps];
};

struct PartialNormParams {
  uint rows;
  uint width;    // columns that are normed
  uint columns;  // in all
  float epsilon;
  float scale_offset;
};

enum { outputs_a_team = 4 };  // of matvec
enum { together = 8 };        // rows of weight that vecmat reads

struct MatvecParams {
  uint rows;
  uint width;    // elements that are summed
  uint outputs;
  uint strip;    // outputs a team of vecmat
};
