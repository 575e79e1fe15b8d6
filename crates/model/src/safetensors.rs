//! Safetensors files, single and sharded, over mapped bytes.
//!
//! A file is a little-endian u64 `n`, `n` bytes of JSON that map each tensor's name to its type, shape and
//! byte range, then the bytes (<https://github.com/huggingface/safetensors#format>). The bytes come from
//! outside, so every number is checked before it is used: [`Tensors::open`] succeeds only where each range lies
//! in its file, overlaps no other, and is as long as its type and shape say. Nothing is copied.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::ModelError;
use crate::source::Source;
use crate::weights::Blob;

/// The file of a checkpoint in one piece.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The file that says which shard holds which tensor.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bytes of the length that opens a file.
const LENGTH_BYTES: usize = 8;
/// Longest header that is parsed; the format's reference implementation has the same bound.
const MAX_HEADER: u64 = 100_000_000;
/// Most dimensions of a tensor; the largest here has three.
const MAX_RANK: usize = 8;

/// Element type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// 32-bit words: packed quantized elements.
    U32,
    /// A type that no tensor of the model has, by its name in the file.
    Other(String),
}

impl Dtype {
    fn from_name(name: &str) -> Dtype {
        match name {
            "BF16" => Dtype::Bf16,
            "F16" => Dtype::F16,
            "F32" => Dtype::F32,
            "U32" => Dtype::U32,
            other => Dtype::Other(other.to_owned()),
        }
    }

    /// Bytes of one element, where the type is one that the format has always had.
    pub(crate) fn bytes(&self) -> Option<u64> {
        match self {
            Dtype::Bf16 | Dtype::F16 => Some(2),
            Dtype::F32 | Dtype::U32 => Some(4),
            Dtype::Other(name) => match name.as_str() {
                "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" => Some(1),
                "U16" | "I16" => Some(2),
                "I32" => Some(4),
                "U64" | "I64" | "F64" | "C64" => Some(8),
                _ => None,
            },
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
            Dtype::U32 => "U32",
            Dtype::Other(name) => name,
        })
    }
}

/// One stored tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes, in place, little-endian, row-major, not aligned.
    pub data: Blob,
    /// The name of the file that holds it.
    pub file: Arc<str>,
}

/// All tensors of a checkpoint by the names that its files give them.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    by_name: BTreeMap<String, Tensor>,
}

impl Tensors {
    /// Reads the headers of `source`: the shards that [`INDEX_FILE`] names where there is one, else
    /// [`SINGLE_FILE`].
    ///
    /// # Errors
    /// [`ModelError`] naming the file and what is wrong with it.
    pub fn open(source: &Source) -> Result<Tensors, ModelError> {
        let mut tensors = Tensors::default();
        let Some(index) = source.open(INDEX_FILE)? else {
            let file = source.open(SINGLE_FILE)?.ok_or_else(|| {
                ModelError::file(
                    source.path(SINGLE_FILE),
                    format!(
                        "there is no such file, nor {INDEX_FILE} beside it; a checkpoint needs one of them"
                    ),
                )
            })?;
            tensors.add(source, SINGLE_FILE, &file)?;
            return Ok(tensors);
        };
        let index_path = source.path(INDEX_FILE);
        let weight_map = parse_index(&index_path, &index)?;
        let shards: BTreeSet<&String> = weight_map.values().collect();
        for shard in shards {
            let file = source.open(shard)?.ok_or_else(|| {
                ModelError::file(
                    &index_path,
                    format!("it names the shard {shard}, and there is no such file beside it"),
                )
            })?;
            tensors.add(source, shard, &file)?;
        }
        if let Some((tensor, shard)) = weight_map.iter().find(|(name, _)| tensors.get(name).is_none()) {
            let problem = format!("it places tensor `{tensor}` in {shard}, which does not hold it");
            return Err(ModelError::file(index_path, problem));
        }
        Ok(tensors)
    }

    /// The tensor called `name` in the files.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name)
    }

    /// All tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.by_name.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Adds the tensors of one file of `source`.
    fn add(&mut self, source: &Source, name: &str, file: &Blob) -> Result<(), ModelError> {
        let path = source.path(name);
        let tensors = parse_file(name, file).map_err(|problem| ModelError::file(&path, problem))?;
        for (name, tensor) in tensors {
            if self.by_name.contains_key(&name) {
                let problem =
                    format!("tensor `{name}` stands here and in another shard; each may appear once");
                return Err(ModelError::file(path, problem));
            }
            self.by_name.insert(name, tensor);
        }
        Ok(())
    }
}

/// The `weight_map` of an index file: tensor to shard.
fn parse_index(path: &str, bytes: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(bytes).map_err(|e| {
        ModelError::file(path, format!("expected an object with a `weight_map` of strings ({e})"))
    })?;
    if index.weight_map.is_empty() {
        return Err(ModelError::file(path, "its `weight_map` is empty"));
    }
    Ok(index.weight_map)
}

/// The tensors of the file `file_name`, or a sentence that says what is wrong with it.
fn parse_file(file_name: &str, file: &Blob) -> Result<Vec<(String, Tensor)>, String> {
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or_else(|| {
        format!("it has {} bytes; a safetensors file begins with an {LENGTH_BYTES}-byte length", file.len())
    })?;
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > MAX_HEADER {
        return Err(format!("its header claims {header_bytes} bytes; at most {MAX_HEADER} are read"));
    }
    let Some(header) = rest.get(..header_bytes as usize) else {
        let held = rest.len();
        return Err(format!(
            "its header claims {header_bytes} bytes and only {held} follow: the file is truncated"
        ));
    };
    let header: Header =
        serde_json::from_slice(header).map_err(|e| format!("its header is not a valid one ({e})"))?;
    let body_start = LENGTH_BYTES + header_bytes as usize;
    let body = file.len() - body_start;

    let mut tensors = Vec::with_capacity(header.0.len());
    let mut ranges = Vec::with_capacity(header.0.len());
    let mut names = BTreeSet::new();
    let holder: Arc<str> = file_name.into();
    for (name, entry) in header.0 {
        let [start, end] = entry.data_offsets;
        if start > end || end > body as u64 {
            return Err(format!(
                "tensor `{name}` claims bytes {start} to {end} of the {body} that follow the header: \
                 the file is truncated or damaged"
            ));
        }
        let dtype = Dtype::from_name(&entry.dtype);
        let shape = checked_shape(&name, &dtype, &entry.shape, end - start)?;
        // The range lies inside the file, whose length is a usize.
        let (start, end) = (start as usize, end as usize);
        let data = file.slice(body_start + start..body_start + end).ok_or("its header is damaged")?;
        if !names.insert(name.clone()) {
            return Err(format!("its header names tensor `{name}` twice"));
        }
        ranges.push((start, end, name.clone()));
        tensors.push((name, Tensor { dtype, shape, data, file: holder.clone() }));
    }
    ranges.retain(|(start, end, _)| start < end);
    ranges.sort();
    for pair in ranges.windows(2) {
        if pair[0].1 > pair[1].0 {
            return Err(format!("tensors `{}` and `{}` overlap", pair[0].2, pair[1].2));
        }
    }
    Ok(tensors)
}

/// The shape as sizes, having checked that it and the type make up `bytes`.
fn checked_shape(name: &str, dtype: &Dtype, shape: &[u64], bytes: u64) -> Result<Vec<usize>, String> {
    if shape.len() > MAX_RANK {
        return Err(format!("tensor `{name}` has {} dimensions; at most {MAX_RANK} are read", shape.len()));
    }
    let sizes: Option<Vec<usize>> = shape.iter().map(|&n| usize::try_from(n).ok()).collect();
    let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
    let (Some(sizes), Some(elements)) = (sizes, elements) else {
        return Err(format!("tensor `{name}` has the absurd shape {shape:?}"));
    };
    let Some(size) = dtype.bytes() else {
        // A type younger than this program: the tensor is refused where the model wants it, and only there.
        return Ok(sizes);
    };
    if elements.checked_mul(size) != Some(bytes) {
        return Err(format!("tensor `{name}` ({dtype} {shape:?}) has {bytes} bytes, which is not its size"));
    }
    Ok(sizes)
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header as a list: a map would hide a name that stands twice.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
