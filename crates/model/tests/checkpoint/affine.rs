//! Quantized rows mean what MLX says they mean.

use lily_model::affine::dequantize_row;
use lily_model::weights::{Format, MatrixView};
use serde_json::Value;

#[test]
fn rows_that_mlx_quantized_come_back_as_mlx_dequantizes_them() {
    let cases: Value = serde_json::from_str(include_str!("../data/affine.json")).unwrap();
    for format in [Format::Affine4, Format::Affine8] {
        let case = &cases[format.to_string()];
        let integers = |field: &str| -> Vec<u32> { serde_json::from_value(case[field].clone()).unwrap() };
        let halves = |field| -> Vec<u8> {
            integers(field).iter().flat_map(|&v| u16::try_from(v).unwrap().to_le_bytes()).collect()
        };
        let data: Vec<u8> = integers("words").iter().flat_map(|w| w.to_le_bytes()).collect();
        let (scales, biases) = (halves("scales"), halves("biases"));
        let (rows, cols) = (2, 128);
        let matrix = MatrixView { rows, cols, format, data: &data, scales: &scales, biases: &biases };
        let mut weights = Vec::new();
        let mut row = vec![0.0; cols];
        for r in 0..rows {
            dequantize_row(matrix, r, &mut row);
            weights.extend(row.iter().map(|w| w.to_bits()));
        }
        assert_eq!(weights, integers("weights"), "{format}");
    }
}
