//! Which tensors the kernels of a layer read together.

use lily_model::weights::{Format, LayerWeights, Matrix, Mixer, Weights};

/// Bytes of a bf16.
pub(crate) const BF16: u64 = 2;

/// The projections of one kernel.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// The stage's name.
    pub name: &'static str,
    /// Name and matrix of each projection.
    pub matrices: Vec<(&'static str, &'a Matrix)>,
}

/// The projections of a layer's kernels, in the order of the pass.
pub fn groups(layer: &LayerWeights) -> Vec<Group<'_>> {
    let (moe, group) = (&layer.moe, |name, matrices| Group { name, matrices });
    let mut groups = match &layer.mixer {
        Mixer::Delta(w) => vec![
            group(
                "delta_in",
                vec![("qkv", &w.in_proj_qkv), ("z", &w.in_proj_z), ("b", &w.in_proj_b), ("a", &w.in_proj_a)],
            ),
            group("delta_out", vec![("out", &w.out_proj)]),
        ],
        Mixer::Attention(w) => vec![
            group("attn_in", vec![("q", &w.q_proj), ("k", &w.k_proj), ("v", &w.v_proj)]),
            group("attn_out", vec![("o", &w.o_proj)]),
        ],
    };
    let up = vec![
        ("gate", &moe.gate_proj),
        ("up", &moe.up_proj),
        ("shared_gate", &moe.shared_gate_proj),
        ("shared_up", &moe.shared_up_proj),
    ];
    groups.push(group(
        "moe_route",
        vec![("router", &moe.gate), ("shared_expert_gate", &moe.shared_expert_gate)],
    ));
    groups.push(group("moe_up", up));
    groups.push(group("moe_down", vec![("down", &moe.down_proj), ("shared_down", &moe.shared_down_proj)]));
    groups
}

/// The vectors of a layer, by name.
pub fn vectors(layer: &LayerWeights) -> Vec<(&'static str, &[f32])> {
    let mut vectors: Vec<(&str, &[f32])> =
        vec![("input_norm", &layer.input_norm), ("post_norm", &layer.post_norm)];
    match &layer.mixer {
        Mixer::Delta(w) => vectors.extend([
            ("conv1d", &w.conv1d[..]),
            ("a_log", &w.a_log),
            ("dt_bias", &w.dt_bias),
            ("norm", &w.norm),
        ]),
        Mixer::Attention(w) => vectors.extend([("q_norm", &w.q_norm[..]), ("k_norm", &w.k_norm)]),
    }
    vectors
}

/// What belongs to no layer: the embedding table and the head.
pub fn outer_groups(weights: &Weights) -> [Group<'_>; 2] {
    [
        Group { name: "embed", matrices: vec![("embed_tokens", &weights.embed_tokens)] },
        Group { name: "head", matrices: vec![("lm_head", &weights.lm_head)] },
    ]
}

/// The buffers of a matrix, or of a stack of them, that lies in place: what each name ends in, and its bytes.
pub fn parts(matrix: &Matrix) -> [(&'static str, u64); 3] {
    let (data, vector) = (matrix.data_bytes() as u64, matrix.groups() as u64 * BF16);
    [("", data), (".scales", vector), (".biases", vector)]
        .map(|(part, bytes)| (part, bytes * matrix.count as u64))
}

/// Refuses formats that the kernels do not read.
///
/// # Errors
/// What is where another format is expected, for a sentence that begins with what the kernels cannot run.
pub fn check_formats(weights: &Weights) -> Result<(), String> {
    let expect = |place: String, matrix: &Matrix, expected: Format| {
        if matrix.format == expected {
            return Ok(());
        }
        let found = matrix.format;
        Err(format!("{place} is {found}, and its kernels read {expected} there"))
    };
    for group in outer_groups(weights) {
        for (name, matrix) in group.matrices {
            expect(name.to_owned(), matrix, Format::Affine4)?;
        }
    }
    for (index, layer) in weights.layers.iter().enumerate() {
        for group in groups(layer) {
            let expected = if group.name == "moe_route" { Format::Affine8 } else { Format::Affine4 };
            for (name, matrix) in group.matrices {
                expect(format!("{} {name} of layer {index}", group.name), matrix, expected)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use lily_model::checkpoint::Checkpoint;

    use super::*;

    #[test]
    fn formats_that_the_kernels_do_not_read_are_named() {
        let mut weights = Checkpoint::demo().unwrap().weights().unwrap();
        weights.layers[1].moe.down_proj.format = Format::Affine8;
        let sentence = check_formats(&weights).unwrap_err();
        assert!(sentence.contains("moe_down down of layer 1 is 8-bit"), "{sentence}");
    }
}
