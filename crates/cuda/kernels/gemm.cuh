// Products of quantized matrices with many rows of activations, on the tensor cores: gemm_wgmma.cuh on Hopper, gemm_mma.cuh elsewhere.
// Both compute decode's bits (tiles.cuh), and both have:
//
//   Gemm<BITS, SORTED>   sizes: TILES of 16 matrix rows and TOKENS rows of activations at the most of an item of work
//   gemm<G>(...)         the products of one item after the other, or of one item a block
//   round_into(...)      eight inputs a lane, one chunk a warp, rounded into a row as the products want it
//   LAUNCH_GEMM(kernel, G, blocks)   the launch shape: `blocks` items side by side for each TOKENS rows (0: the plan says)
#pragma once
#include "prompt.cuh"
#include "tiles.cuh"

constexpr int BLOCK_TILES = 8;

// Where a product is not added to anything.
struct NoPrior {
  __device__ void operator()(int, u32, float&, float&) const {}
};

// Some tiles by some tokens.
struct Item {
  const u8* matrix;  // of the first tile
  int tiles;         // that exist, at least one
  int tokens;        // 0: there is no such item
  int first_tile, first_token;
};
// Item `i` of the product of `rows` tokens with a matrix of `tiles`; neighbours have the same tokens.
template <class G> __device__ __forceinline__ Item dense_item(int i, const u8* matrix, int tiles, int chunks, int rows) {
  const int blocks = ceil_div(tiles, G::TILES), first = i % blocks * G::TILES, token = i / blocks * G::TOKENS;
  return {matrix + (u64)first * chunks * G::BYTES, min(G::TILES, tiles - first), max(min(G::TOKENS, rows - token), 0), first, token};
}
// The same of experts of `tiles` each, with the runs of moe_sort.
template <class G> __device__ __forceinline__ Item expert_item(int i, const u8* matrix, int tiles, int chunks, const u32* runs) {
  const int blocks = ceil_div(tiles, G::TILES), first = i % blocks * G::TILES;
  const u32 number = i / blocks;
  if (number >= runs[0]) return {matrix, 1, 0, 0, 0};
  const uint4 run = *(const uint4*)(runs + RUN_WORDS * (1 + number));
  return {matrix + ((u64)run.x * tiles + first) * chunks * G::BYTES, min(G::TILES, tiles - first), (int)run.z, first, (int)run.y};
}

#if WARPGROUPS
#include "gemm_wgmma.cuh"
#else
#include "gemm_mma.cuh"
#endif
