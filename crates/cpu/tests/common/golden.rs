//! Golden files of `oracle/golden`, and how a result is compared with them.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::path::{Path, PathBuf};

use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, Want};
use lily_model::weights::Weights;
use safetensors::{Dtype, SafeTensors};

/// A file or folder of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A golden safetensors file.
pub struct Golden {
    bytes: Vec<u8>,
    name: &'static str,
}

impl Golden {
    pub fn open(name: &'static str) -> Golden {
        let path = repository("oracle/golden").join(name);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Golden { bytes, name }
    }

    fn tensor(&self, tensor: &str, dtype: Dtype) -> Vec<u8> {
        let tensors = SafeTensors::deserialize(&self.bytes).expect(self.name);
        let view = tensors.tensor(tensor).unwrap_or_else(|e| panic!("{} of {}: {e}", tensor, self.name));
        assert_eq!(view.dtype(), dtype, "{tensor} of {}", self.name);
        view.data().to_vec()
    }

    pub fn floats(&self, tensor: &str) -> Vec<f32> {
        let bytes = self.tensor(tensor, Dtype::F32);
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn ids(&self, tensor: &str) -> Vec<u32> {
        let bytes = self.tensor(tensor, Dtype::I32);
        bytes.as_chunks::<4>().0.iter().map(|b| u32::try_from(i32::from_le_bytes(*b)).unwrap()).collect()
    }

    pub fn flags(&self, tensor: &str) -> Vec<bool> {
        self.tensor(tensor, Dtype::U8).iter().map(|&b| b != 0).collect()
    }
}

/// `max|a - b| / max|b|`: the largest error of any element in units of the largest value.
pub fn relative_error(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let largest = b.iter().fold(0.0f32, |m, b| m.max(b.abs()));
    // Written so that a NaN is an infinite error and not a small one.
    let worst = a.iter().zip(b).fold(0.0f32, |m, (a, b)| if (a - b).abs() <= m { m } else { (a - b).abs() });
    if worst.is_nan() { f32::INFINITY } else { worst / largest }
}

pub fn backend(weights: Weights, numerics: Numerics) -> CpuBackend {
    let ctx_len = weights.geometry.max_context;
    CpuBackend::new(weights, CpuOptions { threads: None, ctx_len, numerics, ..CpuOptions::default() })
        .expect("a backend")
}

/// Logits `[tokens, vocab]` after every token of a fresh sequence.
pub fn all_logits(backend: &mut CpuBackend, tokens: &[u32]) -> Vec<f32> {
    let sequence = backend.open(None).unwrap();
    let ticket = backend.extend(sequence, tokens, Want::AllLogits).unwrap();
    let output = backend.collect(ticket).unwrap().remove(0);
    backend.close(sequence);
    output.logits
}
