//! Weight files on their way to the disk: which tensor goes into which, what they are called, their headers and the
//! index over them.
//!
//! A file is written under a temporary name and renamed when it is whole, so that a file under its own name is one.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::ModelError;
use crate::safetensors::{Dtype, SINGLE_FILE};

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Its element type: [`Dtype::Bf16`], [`Dtype::F16`], [`Dtype::F32`] or [`Dtype::U32`].
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<usize>,
}

impl StoredTensor {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.bytes().unwrap_or_default()
    }
}

/// `items` in order, cut where a file would grow beyond `limit` bytes; an item of more gets a file to itself.
pub(crate) fn cut<T>(items: Vec<T>, bytes: impl Fn(&T) -> u64, limit: u64) -> Vec<Vec<T>> {
    let mut shards: Vec<Vec<T>> = vec![Vec::new()];
    let mut size = 0;
    for item in items {
        let more = bytes(&item);
        let last = shards.len() - 1;
        if size + more > limit && !shards[last].is_empty() {
            shards.push(vec![item]);
            size = more;
        } else {
            shards[last].push(item);
            size += more;
        }
    }
    shards
}

/// What the weight files are called when there are `count` of them.
pub(crate) fn names(count: usize) -> Vec<String> {
    if count == 1 {
        return vec![SINGLE_FILE.to_owned()];
    }
    (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors")).collect()
}

/// What stands before the elements of `tensors`, which follow one after the other.
pub(crate) fn header<'a>(tensors: impl Iterator<Item = &'a StoredTensor>) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "mlx"}));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes();
        let entry = json!({
            "dtype": tensor.dtype.to_string(),
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        });
        header.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(header).to_string();
    // Spaces at the end, so that the elements begin at a multiple of eight bytes.
    let padded = header.len().next_multiple_of(size_of::<u64>());
    header.extend(std::iter::repeat_n(' ', padded - header.len()));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

/// The index over `entries`, each a tensor's name and its file, of `bytes` bytes of tensors.
pub(crate) fn index<'a>(entries: impl Iterator<Item = (&'a str, &'a str)>, bytes: u64) -> Vec<u8> {
    let map: Map<String, Value> = entries.map(|(tensor, file)| (tensor.to_owned(), json!(file))).collect();
    pretty(&json!({"metadata": {"total_size": bytes}, "weight_map": map}))
}

/// `value` as the text of a file.
pub(crate) fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Where the file `name` of `dir` is until it is whole.
pub(crate) fn temporary(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.partial"))
}

/// Refuses to begin where the disk of `dir` has no room for `needed` bytes, `held` of which are taken by files that
/// will be overwritten.
pub(crate) fn require_room(dir: &Path, needed: u64, held: u64) -> Result<(), ModelError> {
    let free = fs4::available_space(dir).map_err(|e| write_error(dir, e))?.saturating_add(held);
    if free < needed {
        return Err(ModelError::DiskFull { dir: dir.display().to_string(), needed, free });
    }
    Ok(())
}

pub(crate) fn write_error(path: &Path, reason: io::Error) -> ModelError {
    ModelError::Write { file: path.display().to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_disk_cannot_hold_is_refused_and_what_is_overwritten_counts_as_free() {
        let dir = tempfile::tempdir().unwrap();
        let refused = require_room(dir.path(), u64::MAX, 0).unwrap_err();
        assert!(matches!(refused, ModelError::DiskFull { needed: u64::MAX, .. }), "{refused}");
        require_room(dir.path(), u64::MAX, u64::MAX).unwrap();
    }

    #[test]
    fn files_are_cut_before_they_grow_too_large_and_hold_at_least_one_item() {
        let shards = cut(vec![3, 4, 20, 1, 1], |&bytes| bytes, 7);
        assert_eq!(shards, [vec![3, 4], vec![20], vec![1, 1]]);
    }
}
