//! Where the elements of a module stand in the source.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::f16;

use crate::affine::read_floats;
use crate::error::{ModelError, Refusal};
use crate::layout::{Kind, Module};
use crate::load::float_format;
use crate::names;
use crate::safetensors::{Dtype, Tensor, Tensors};
use crate::shards::StoredTensor;

/// The unquantized elements of a module: `count` matrices of `rows` rows of `cols`, somewhere in a file.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The file.
    pub file: Arc<str>,
    /// The tensor's name in it, for messages.
    pub tensor: String,
    /// Matrices.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Byte in the file at which the first matrix begins.
    start: u64,
    /// Bytes from the beginning of one matrix to that of the next.
    stride: u64,
    dtype: Dtype,
    /// Whether the elements are stored minus one.
    centred: bool,
}

impl Origin {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        float_format(&self.dtype).row_bytes(self.cols)
    }

    /// Byte in the file at which a row begins.
    pub fn offset(&self, matrix: usize, row: usize) -> u64 {
        self.start + matrix as u64 * self.stride + (row * self.row_bytes()) as u64
    }

    /// The elements that `bytes` of the file mean.
    pub fn read(&self, bytes: &[u8], out: &mut [f32]) {
        read_floats(float_format(&self.dtype), bytes, out);
        if self.centred {
            for w in out {
                *w += 1.0;
                // The sum is rounded to the type that it is stored in; where that is bf16, as what is written.
                if self.dtype == Dtype::F16 {
                    *w = f16::from_f32(*w).to_f32();
                }
            }
        }
    }
}

/// A module, where it comes from, and the tensors that it becomes.
#[derive(Clone, Debug)]
pub struct Part {
    /// What it is.
    pub kind: Kind,
    /// Where it comes from.
    pub origin: Origin,
    /// What is written.
    pub tensors: Vec<StoredTensor>,
}

/// A source's tensors by canonical name; they have been checked against the geometry.
pub struct Origins<'a> {
    tensors: BTreeMap<String, (&'a str, &'a Tensor)>,
    zero_centred: bool,
}

impl<'a> Origins<'a> {
    /// Of `tensors`, whose norms are stored minus one where `zero_centred` says so.
    pub fn new(tensors: &'a Tensors, zero_centred: bool) -> Origins<'a> {
        let tensors = tensors
            .iter()
            .filter(|(name, _)| names::skipped(name).is_none())
            .map(|(name, tensor)| (names::canonical(name).into_owned(), (name, tensor)))
            .collect();
        Origins { tensors, zero_centred }
    }

    /// Where each of `modules` comes from.
    pub fn parts(&self, modules: Vec<Module>) -> Result<Vec<Part>, ModelError> {
        modules.into_iter().map(|module| self.part(&module)).collect()
    }

    fn part(&self, module: &Module) -> Result<Part, ModelError> {
        let path = names::canonical(&module.path);
        let mut tensors = module.tensors();
        let (count, rows, cols) = match (module.kind, module.shape.as_slice()) {
            (Kind::Matrix(_), &[count, rows, cols]) => (count, rows, cols),
            (Kind::Matrix(_), &[rows, cols]) => (1, rows, cols),
            (_, shape) => (1, 1, shape.iter().product()),
        };
        // Which of the matrices that stand one after the other for each expert, and of how many.
        let (name, part, parts) = match path.rsplit_once(".switch_mlp.") {
            Some((mlp, projection)) if self.tensors.contains_key(&format!("{mlp}.experts.gate_up_proj")) => {
                match projection {
                    "gate_proj" => (format!("{mlp}.experts.gate_up_proj"), 0, 2),
                    "up_proj" => (format!("{mlp}.experts.gate_up_proj"), 1, 2),
                    _ => (format!("{mlp}.experts.down_proj"), 0, 1),
                }
            }
            _ if matches!(module.kind, Kind::ALog | Kind::DtBias) => (path.into_owned(), 0, 1),
            _ => (format!("{path}.weight"), 0, 1),
        };
        let Some(&(stored, tensor)) = self.tensors.get(&name) else {
            let expected = format!("{:?}", module.shape);
            let refusal = Refusal::Tensor { name, found: "missing".into(), expected };
            return Err(ModelError::Refused(vec![refusal]));
        };
        if module.kind == Kind::ALog {
            tensors.iter_mut().for_each(|a_log| a_log.dtype = tensor.dtype.clone());
        }
        let matrix_bytes = (rows * float_format(&tensor.dtype).row_bytes(cols)) as u64;
        let origin = Origin {
            file: tensor.file.clone(),
            tensor: stored.to_owned(),
            count,
            rows,
            cols,
            start: tensor.data.origin().1 as u64 + part * matrix_bytes,
            stride: parts * matrix_bytes,
            dtype: tensor.dtype.clone(),
            centred: self.zero_centred && module.kind == Kind::CentredNorm,
        };
        Ok(Part { kind: module.kind, origin, tensors })
    }
}
