//! The checkpoint's tensors where they lie: which buffer and offset each of the plan's weight buffers has.
//!
//! A tensor of a mapped file that begins where the kernels can load from stays where it is: the file, from the
//! first page that is needed to the last, is one buffer, or several where it is longer than the longest
//! that the device takes. What begins elsewhere (the format of the files promises nothing), or is part of the
//! program itself, is copied, and so are vectors, which are small.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use lily_gpu::packing;
use lily_gpu::plan::{Plan, Role};
use lily_model::geometry::AttentionGeometry;
use lily_model::weights::{Blob, Matrix, Weights};

use crate::device::{Buffer, Device};
use crate::error::MetalError;

/// Where kernels can load from: they read words of 4 bytes, several at once. Files promise nothing: that of the demo has
/// no tensor at a multiple of 16.
const ALIGNMENT: usize = 4;
/// Where copies begin.
const COPY_ALIGNMENT: usize = 16;
/// The most bytes of a buffer for what is copied; a tensor that is longer has one of its own.
const COPIES: usize = 1 << 30;

/// What a weight buffer of the plan holds.
enum Content {
    /// A tensor as the checkpoint has it.
    Tensor(Blob),
    /// Matrices that the checkpoint has apart, one after the other.
    Parts(Vec<Blob>),
    /// Numbers.
    Floats(Vec<f32>),
}

/// A tensor that stays in a mapped file.
struct InFile {
    /// Its name in the plan.
    name: String,
    file: Blob,
    range: Range<usize>,
}

/// Where a weight buffer of the plan lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    buffer: usize,
    offset: usize,
}

/// Weights that the device can read.
#[derive(Debug)]
pub struct Loaded<B> {
    buffers: Vec<B>,
    places: HashMap<String, Place>,
    mapped: u64,
    copied: u64,
}

impl<B: Buffer> Loaded<B> {
    /// The buffer that a weight buffer of the plan lies in, and where in it.
    pub fn place(&self, name: &str) -> Option<(&B, usize)> {
        self.places.get(name).map(|place| (&self.buffers[place.buffer], place.offset))
    }

    /// Bytes that stay in mapped files.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// Bytes that were copied.
    pub fn copied(&self) -> u64 {
        self.copied
    }
}

/// Bytes of the plan's weights.
pub fn bytes(plan: &Plan) -> u64 {
    plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights).map(|buffer| buffer.bytes).sum()
}

/// Makes everything that `plan` names readable for the device.
///
/// # Errors
/// No memory for it.
pub fn load<D: Device>(device: &D, weights: &Weights, plan: &Plan) -> Result<Loaded<D::Buffer>, MetalError> {
    let mut contents = contents(weights);
    // By where a file is mapped.
    let mut in_place: BTreeMap<usize, Vec<InFile>> = BTreeMap::new();
    let mut copies = Vec::new();
    for buffer in plan.buffers.iter().filter(|buffer| buffer.role == Role::Weights) {
        let content = contents.remove(&buffer.name).filter(|content| content.bytes() as u64 == buffer.bytes);
        let content = content.ok_or_else(|| {
            MetalError::Model(format!(
                "its plan names {}, which nothing fills; please report this",
                buffer.name
            ))
        })?;
        match content {
            Content::Tensor(blob) if stays(device, &blob) => {
                let (file, start) = blob.origin();
                let range = start..start + blob.len();
                let tensors = in_place.entry(file.as_ptr() as usize).or_default();
                tensors.push(InFile { name: buffer.name.clone(), file, range });
            }
            content => copies.push((buffer.name.clone(), content)),
        }
    }
    let mut loaded = Loaded { buffers: Vec::new(), places: HashMap::new(), mapped: 0, copied: 0 };
    for (_, tensors) in in_place {
        map_file(device, tensors, &mut loaded)?;
    }
    copy_rest(device, copies, &mut loaded)?;
    Ok(loaded)
}

/// Whether kernels can read a tensor where it lies.
fn stays<D: Device>(device: &D, blob: &Blob) -> bool {
    let (owner, start) = blob.origin();
    let info = device.info();
    (owner.as_ptr() as usize).is_multiple_of(info.page_bytes)
        && start.is_multiple_of(ALIGNMENT)
        && (blob.len() + info.page_bytes) as u64 <= info.max_buffer
}

/// Makes one file's tensors readable in as few buffers as may be.
fn map_file<D: Device>(
    device: &D,
    mut tensors: Vec<InFile>,
    loaded: &mut Loaded<D::Buffer>,
) -> Result<(), MetalError> {
    let (page, most) = (device.info().page_bytes, device.info().max_buffer);
    tensors.sort_by_key(|tensor| tensor.range.start);
    let mut rest = &tensors[..];
    while let [InFile { file, range, .. }, ..] = rest {
        let start = range.start / page * page;
        let ends = |range: &Range<usize>| (range.end.next_multiple_of(page) - start) as u64 <= most;
        let count = rest.iter().take_while(|tensor| ends(&tensor.range)).count().max(1);
        let (window, others) = rest.split_at(count);
        let end = window.iter().map(|tensor| tensor.range.end).max().unwrap_or(start);
        let bytes = file.slice(start..end).expect("tensors lie in their file");
        loaded.mapped += bytes.len() as u64;
        let label = format!("weights {}", loaded.buffers.len());
        loaded.buffers.push(device.map(&label, &bytes)?);
        for InFile { name, range, .. } in window {
            let place = Place { buffer: loaded.buffers.len() - 1, offset: range.start - start };
            loaded.places.insert(name.clone(), place);
        }
        rest = others;
    }
    Ok(())
}

/// Copies what cannot stay where it is.
fn copy_rest<D: Device>(
    device: &D,
    copies: Vec<(String, Content)>,
    loaded: &mut Loaded<D::Buffer>,
) -> Result<(), MetalError> {
    let most = COPIES.min(usize::try_from(device.info().max_buffer).unwrap_or(usize::MAX));
    let mut rest = &copies[..];
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(_, content): &&(String, Content)| {
            let is_first = bytes == 0;
            bytes += content.bytes().next_multiple_of(COPY_ALIGNMENT);
            is_first || bytes <= most
        };
        let count = rest.iter().take_while(fits).count();
        let (some, others) = rest.split_at(count);
        let total = some.iter().map(|(_, content)| content.bytes().next_multiple_of(COPY_ALIGNMENT)).sum();
        let buffer = device.allocate(&format!("copied weights {}", loaded.buffers.len()), total)?;
        let mut offset = 0;
        for (name, content) in some {
            content.write(&buffer, offset);
            loaded.places.insert(name.clone(), Place { buffer: loaded.buffers.len(), offset });
            offset += content.bytes().next_multiple_of(COPY_ALIGNMENT);
        }
        loaded.copied += total as u64;
        loaded.buffers.push(buffer);
        rest = others;
    }
    Ok(())
}

impl Content {
    fn bytes(&self) -> usize {
        match self {
            Content::Tensor(blob) => blob.len(),
            Content::Parts(parts) => parts.iter().map(|part| part.len()).sum(),
            Content::Floats(floats) => size_of_val(&floats[..]),
        }
    }

    fn write<B: Buffer>(&self, to: &B, offset: usize) {
        match self {
            Content::Tensor(blob) => to.write(offset, blob),
            Content::Parts(parts) => {
                parts.iter().fold(offset, |offset, part| {
                    to.write(offset, part);
                    offset + part.len()
                });
            }
            Content::Floats(floats) => {
                let bytes: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
                to.write(offset, &bytes);
            }
        }
    }
}

/// What each weight buffer holds, by its name in the plan.
fn contents(weights: &Weights) -> HashMap<String, Content> {
    let mut contents = HashMap::new();
    let [embed, head] = packing::outer_groups(weights);
    add(&mut contents, "embed".to_owned(), embed.matrices[0].1);
    for (name, matrix) in head.matrices {
        add(&mut contents, format!("{}.{name}", head.name), matrix);
    }
    contents.insert("norm".to_owned(), Content::Floats(weights.norm.clone()));
    let frequencies = frequencies(&weights.geometry.attention);
    contents.insert("inv_freq".to_owned(), Content::Floats(frequencies));
    for (index, layer) in weights.layers.iter().enumerate() {
        for group in packing::groups(layer) {
            for (name, matrix) in group.matrices {
                add(&mut contents, format!("layers.{index}.{}.{name}", group.name), matrix);
            }
        }
        for (name, vector) in packing::vectors(layer) {
            contents.insert(format!("layers.{index}.{name}"), Content::Floats(vector.to_vec()));
        }
    }
    contents
}

/// A matrix's elements, scales and biases, which the plan has as `path`, `path.scales` and `path.biases`.
fn add(contents: &mut HashMap<String, Content>, path: String, matrix: &Matrix) {
    let bytes = matrix.data_bytes();
    let is_whole = matrix.data_stride == bytes || matrix.count == 1;
    let part = |start: usize, length: usize| matrix.data.slice(start..start + length);
    let data = if is_whole {
        part(0, matrix.count * bytes).map(Content::Tensor)
    } else {
        let parts = (0..matrix.count).map(|index| part(index * matrix.data_stride, bytes));
        parts.collect::<Option<_>>().map(Content::Parts)
    };
    // A matrix without bytes has no content, and the plan's buffer finds none.
    contents.extend(data.map(|data| (path.clone(), data)));
    contents.insert(format!("{path}.scales"), Content::Tensor(matrix.scales.clone()));
    contents.insert(format!("{path}.biases"), Content::Tensor(matrix.biases.clone()));
}

/// Rotary frequencies as the reference has them, rounded at every step.
fn frequencies(attention: &AttentionGeometry) -> Vec<f32> {
    let base = attention.rope_theta as f32;
    (0..attention.rotary_dim / 2)
        .map(|i| 1.0 / base.powf((2 * i) as f32 / attention.rotary_dim as f32))
        .collect()
}
