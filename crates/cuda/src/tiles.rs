//! Quantized matrices in the layout that the tensor cores read: tiles of 16 rows, cut into chunks of 256 inputs.
//!
//! Within a chunk the bytes stand in the order in which the lanes of a warp take them, so that each lane's share
//! of a product is one load of 16 bytes. With `lane = 4 g + t`, `g < 8`, `t < 4`:
//!
//! - **4-bit**, 2304 bytes: at `512 j + 16 lane`, for each of the four groups `j`, 8 bytes of row `g` and 8 of row
//!   `g + 8`: bytes `8 t .. 8 t + 8` of the group's 32.
//! - **8-bit**, 4352 bytes: at `1024 j + 512 h + 16 lane`, `h < 2`, the group's bytes `16 t .. 16 t + 16` of row
//!   `g + 8 h`, in the order [`BYTE_ORDER`].
//! - Then at `8 lane` scale and bias of row `g` and of row `g + 8`, of group `t`.
//!
//! Rows and inputs that a matrix does not have are zero, scales and biases too.

use lily_gpu::target::{CHUNK_INPUTS, CHUNK4_BYTES, CHUNK8_BYTES, TILE_ROWS};
use lily_model::weights::{Format, GROUP_SIZE, MatrixView};

/// Groups of a chunk.
const GROUPS: usize = CHUNK_INPUTS / GROUP_SIZE;
/// Lanes that share a row.
const LANES: usize = 4;
/// Rows that lanes of a warp have first; their second rows come as many later.
const HALF: usize = TILE_ROWS / 2;
/// Which of 16 neighbouring inputs of an 8-bit row stands at each place.
pub const BYTE_ORDER: [usize; 16] = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];

/// A row of a matrix: the matrix, and which.
pub type Row<'a> = (MatrixView<'a>, usize);

/// Bytes of a chunk of that format.
pub fn chunk_bytes(format: Format) -> usize {
    if format == Format::Affine8 { CHUNK8_BYTES } else { CHUNK4_BYTES }
}

/// Bytes of a tile of `inputs` inputs.
pub fn tile_bytes(format: Format, inputs: usize) -> usize {
    inputs.div_ceil(CHUNK_INPUTS) * chunk_bytes(format)
}

/// Writes one tile; `out` has [`tile_bytes`]. All rows have the same format and inputs.
pub fn pack(rows: &[Option<Row<'_>>; TILE_ROWS], format: Format, out: &mut [u8]) {
    let chunk_bytes = chunk_bytes(format);
    out.fill(0);
    for (place, row) in rows.iter().enumerate() {
        let Some((matrix, row)) = row else { continue };
        let data_bytes = matrix.format.row_bytes(matrix.cols);
        let data = &matrix.data[row * data_bytes..(row + 1) * data_bytes];
        let groups = matrix.cols / GROUP_SIZE;
        let (g, h) = (place % HALF, place / HALF);
        for group in 0..groups {
            let (chunk, j) = (group / GROUPS, group % GROUPS);
            let out = &mut out[chunk * chunk_bytes..(chunk + 1) * chunk_bytes];
            if format == Format::Affine8 {
                let data = &data[group * GROUP_SIZE..(group + 1) * GROUP_SIZE];
                for t in 0..LANES {
                    let to = 1024 * j + 512 * h + 16 * (4 * g + t);
                    for (byte, from) in out[to..to + 16].iter_mut().zip(BYTE_ORDER) {
                        *byte = data[16 * t + from];
                    }
                }
            } else {
                let data = &data[group * GROUP_SIZE / 2..(group + 1) * GROUP_SIZE / 2];
                for t in 0..LANES {
                    let to = 512 * j + 16 * (4 * g + t) + 8 * h;
                    out[to..to + 8].copy_from_slice(&data[8 * t..8 * t + 8]);
                }
            }
            let to = chunk_bytes - 256 + 8 * (4 * g + j) + 4 * h;
            let from = 2 * (row * groups + group);
            out[to..to + 2].copy_from_slice(&matrix.scales[from..from + 2]);
            out[to + 2..to + 4].copy_from_slice(&matrix.biases[from..from + 2]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_model::checkpoint::Checkpoint;
    use lily_model::weights::{Matrix, Mixer};

    /// The quantized number of an input of a row of a tile, and the bits of its scale and bias, read as the
    /// kernels' page says.
    fn at(tile: &[u8], format: Format, row: usize, input: usize) -> (u8, u16, u16) {
        let chunk_bytes = chunk_bytes(format);
        let chunk = &tile[input / 256 * chunk_bytes..];
        let (g, h, j, within) = (row % 8, row / 8, input % 256 / 64, input % 64);
        let value = if format == Format::Affine8 {
            let (t, place) = (within / 16, BYTE_ORDER.iter().position(|&i| i == within % 16).unwrap());
            chunk[1024 * j + 512 * h + 16 * (4 * g + t) + place]
        } else {
            let (t, byte) = (within / 16, within % 16 / 2);
            chunk[512 * j + 16 * (4 * g + t) + 8 * h + byte] >> (4 * (within % 2)) & 15
        };
        let pair = chunk_bytes - 256 + 8 * (4 * g + j) + 4 * h;
        let word = |at: usize| u16::from_le_bytes([chunk[at], chunk[at + 1]]);
        (value, word(pair), word(pair + 2))
    }

    fn stored(matrix: &MatrixView<'_>, row: usize, input: usize) -> (u8, u16, u16) {
        let index = row * matrix.cols + input;
        let value = match matrix.format {
            Format::Affine8 => matrix.data[index],
            _ => matrix.data[index / 2] >> (4 * (index % 2)) & 15,
        };
        let word = |bytes: &[u8]| u16::from_le_bytes([bytes[index / 64 * 2], bytes[index / 64 * 2 + 1]]);
        (value, word(matrix.scales), word(matrix.biases))
    }

    #[test]
    fn every_weight_stands_where_the_kernels_look_for_it() {
        let weights = Checkpoint::demo().unwrap().weights().unwrap();
        let Mixer::Delta(delta) = &weights.layers[0].mixer else { panic!("the first layer is a DeltaNet") };
        let moe = &weights.layers[0].moe;
        // Of 512, 256 and 64 inputs, and of 8 bits.
        let matrices: [&Matrix; 4] = [&delta.out_proj, &delta.in_proj_qkv, &moe.down_proj, &moe.gate];
        for matrix in matrices {
            let view = matrix.at(0);
            let rows: [Option<Row>; 16] = std::array::from_fn(|row| (row < 13).then_some((view, row + 2)));
            let mut tile = vec![0xff; tile_bytes(view.format, view.cols)];
            pack(&rows, view.format, &mut tile);
            for row in 0..16 {
                for input in 0..view.cols.next_multiple_of(256) {
                    let found = at(&tile, view.format, row, input);
                    let missing = row >= 13 || input >= view.cols;
                    let expected = if missing { (0, 0, 0) } else { stored(&view, row + 2, input) };
                    assert_eq!(found, expected, "row {row}, input {input} of {} inputs", view.cols);
                }
            }
        }
    }
}
