//! The weight files of a conversion, written by several threads a piece at a time.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::{bf16, f16};

use super::Options;
use super::origin::Part;
use crate::error::ModelError;
use crate::layout::Kind;
use crate::quantize::{AffineRow, NotFinite, Rounding, quantize_row};
use crate::safetensors::Dtype;
use crate::shards::{self, temporary, write_error};
use crate::weights::GROUP_SIZE;

/// Bytes of the source that a thread has in memory, unless a single row has more. What a thread makes of them is never
/// larger than they.
const PIECE_BYTES: usize = 4 << 20;

/// A weight file.
pub struct Shard {
    name: String,
    header: Vec<u8>,
    parts: Vec<Part>,
}

/// Rows of one matrix of a module.
struct Piece {
    shard: usize,
    part: usize,
    matrix: usize,
    rows: Range<usize>,
    /// Byte of the weight file at which each tensor of the module begins.
    starts: [u64; 3],
}

impl Shard {
    /// `parts` in files of at most `limit` bytes of tensors.
    pub fn cut(parts: Vec<Part>, limit: u64) -> Vec<Shard> {
        let bytes = |part: &Part| part.tensors.iter().map(|tensor| tensor.bytes()).sum();
        let shards = shards::cut(parts, bytes, limit);
        let names = shards::names(shards.len());
        let shard = |(parts, name): (Vec<Part>, _)| {
            let header = shards::header(parts.iter().flat_map(|part| &part.tensors));
            Shard { name, header, parts }
        };
        shards.into_iter().zip(names).map(shard).collect()
    }

    /// Bytes of its tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.parts.iter().flat_map(|part| &part.tensors).map(|tensor| tensor.bytes()).sum()
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.header.len() as u64 + self.tensor_bytes()
    }

    /// Names of its tensors, each with the file's.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        let tensors = self.parts.iter().flat_map(|part| &part.tensors);
        tensors.map(|tensor| (tensor.name.as_str(), self.name.as_str()))
    }

    /// Whether it is in `dir` under its own name, with the length and the header that it should have.
    pub fn is_whole(&self, dir: &Path) -> bool {
        let begins_right = |mut file: File| -> io::Result<bool> {
            let mut header = vec![0; self.header.len()];
            file.read_exact(&mut header)?;
            Ok(header == self.header && file.metadata()?.len() == self.file_bytes())
        };
        File::open(dir.join(&self.name)).and_then(begins_right).unwrap_or(false)
    }

    /// Bytes that are given back when it is written anew.
    pub fn held_bytes(&self, dir: &Path) -> u64 {
        let length = |path| fs::metadata(path).map_or(0, |meta| meta.len());
        length(temporary(dir, &self.name)) + length(dir.join(&self.name))
    }

    fn pieces(&self, shard: usize, out: &mut Vec<Piece>) {
        let mut start = self.header.len() as u64;
        for (index, part) in self.parts.iter().enumerate() {
            let mut starts = [0; 3];
            for (at, tensor) in starts.iter_mut().zip(&part.tensors) {
                *at = start;
                start += tensor.bytes();
            }
            let origin = &part.origin;
            let step = (PIECE_BYTES / origin.row_bytes()).max(1);
            for matrix in 0..origin.count {
                for row in (0..origin.rows).step_by(step) {
                    let rows = row..(row + step).min(origin.rows);
                    out.push(Piece { shard, part: index, matrix, rows, starts });
                }
            }
        }
    }
}

/// Writes those of `shards` into `to` that are not `whole`, from the files in `from`.
pub fn write(
    from: &Path,
    to: &Path,
    shards: &[Shard],
    whole: &[bool],
    options: &Options,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), ModelError> {
    let mut pieces = Vec::new();
    let mut done = 0;
    for (index, (shard, whole)) in shards.iter().zip(whole).enumerate() {
        if *whole {
            done += shard.tensor_bytes();
        } else {
            shard.pieces(index, &mut pieces);
        }
    }
    let mut outputs: Vec<Output> = shards.iter().map(|_| Output::default()).collect();
    for piece in &pieces {
        *outputs[piece.shard].left.get_mut() += 1;
    }
    let total = shards.iter().map(Shard::tensor_bytes).sum();
    let writing = Writing {
        from,
        to,
        shards,
        pieces: &pieces,
        outputs: &outputs,
        rounding: options.rounding,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        done: AtomicU64::new(done),
        total,
        progress,
    };
    progress(done, total);
    let first_error = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..options.threads.clamp(1, pieces.len().max(1)) {
            scope.spawn(|| {
                if let Err(error) = writing.work() {
                    writing.failed.store(true, Ordering::Relaxed);
                    lock(&first_error).get_or_insert(error);
                }
            });
        }
    });
    match first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => {
            // Half files would only take up the disk; that one cannot be removed changes nothing of the error.
            shards.iter().for_each(|shard| drop(fs::remove_file(temporary(to, &shard.name))));
            Err(error)
        }
        None => Ok(()),
    }
}

/// A weight file on its way.
#[derive(Default)]
struct Output {
    /// Open from its first piece to its last.
    file: Mutex<Option<File>>,
    /// Pieces that are not written yet.
    left: AtomicUsize,
}

/// What all threads share.
struct Writing<'a> {
    from: &'a Path,
    to: &'a Path,
    shards: &'a [Shard],
    pieces: &'a [Piece],
    outputs: &'a [Output],
    rounding: Rounding,
    next: AtomicUsize,
    failed: AtomicBool,
    done: AtomicU64,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl Writing<'_> {
    /// What one thread does.
    fn work(&self) -> Result<(), ModelError> {
        let mut worker = Worker::default();
        while !self.failed.load(Ordering::Relaxed) {
            let Some(piece) = self.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            let part = &self.shards[piece.shard].parts[piece.part];
            worker.read(self.from, part, piece)?;
            worker.convert(part, self.rounding).map_err(|NotFinite| {
                let problem = format!(
                    "tensor `{}` holds numbers that are infinite, not numbers or too far apart for a group of \
                     {GROUP_SIZE} to hold them: the file is damaged, or the training that wrote it failed",
                    part.origin.tensor
                );
                ModelError::file(self.from.join(&*part.origin.file).display().to_string(), problem)
            })?;
            self.put(piece, part, &worker.out)?;
        }
        Ok(())
    }

    /// Writes what a piece became, and ends the file with its last piece.
    fn put(&self, piece: &Piece, part: &Part, out: &[Vec<u8>; 3]) -> Result<(), ModelError> {
        let shard = &self.shards[piece.shard];
        let output = &self.outputs[piece.shard];
        let path = temporary(self.to, &shard.name);
        let failed = |e| write_failed(&path, e);
        let written = {
            let mut file = lock(&output.file);
            let file = match &mut *file {
                Some(file) => file,
                empty => {
                    let mut file = File::create(&path).map_err(failed)?;
                    file.write_all(&shard.header).map_err(failed)?;
                    empty.insert(file)
                }
            };
            let first = (piece.matrix * part.origin.rows + piece.rows.start) as u64;
            let mut written = 0;
            for (bytes, start) in out.iter().zip(piece.starts).filter(|(bytes, _)| !bytes.is_empty()) {
                let row = (bytes.len() / piece.rows.len()) as u64;
                file.seek(SeekFrom::Start(start + first * row)).map_err(failed)?;
                file.write_all(bytes).map_err(failed)?;
                written += bytes.len() as u64;
            }
            written
        };
        let done = self.done.fetch_add(written, Ordering::Relaxed) + written;
        (self.progress)(done, self.total);
        if output.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(file) = lock(&output.file).take()
        {
            file.sync_all().map_err(failed)?;
            drop(file);
            let target = self.to.join(&shard.name);
            fs::rename(&path, &target).map_err(|e| write_error(&target, e))?;
        }
        Ok(())
    }
}

/// A thread's own memory.
#[derive(Default)]
struct Worker {
    /// The source's file that was read last.
    input: Option<(Arc<str>, File)>,
    /// A piece as the source has it.
    bytes: Vec<u8>,
    /// One row of it.
    row: Vec<f32>,
    /// What it becomes: elements, and of a matrix scales and biases.
    out: [Vec<u8>; 3],
}

impl Worker {
    fn read(&mut self, from: &Path, part: &Part, piece: &Piece) -> Result<(), ModelError> {
        let origin = &part.origin;
        let path = from.join(&*origin.file);
        let failed = |reason| ModelError::Io { file: path.display().to_string(), reason };
        let file = match &mut self.input {
            Some((name, file)) if *name == origin.file => file,
            other => &mut other.insert((origin.file.clone(), File::open(&path).map_err(failed)?)).1,
        };
        self.bytes.resize(piece.rows.len() * origin.row_bytes(), 0);
        file.seek(SeekFrom::Start(origin.offset(piece.matrix, piece.rows.start))).map_err(failed)?;
        file.read_exact(&mut self.bytes).map_err(failed)
    }

    /// What the bytes that were read become.
    fn convert(&mut self, part: &Part, rounding: Rounding) -> Result<(), NotFinite> {
        let origin = &part.origin;
        self.row.resize(origin.cols, 0.0);
        self.out.iter_mut().for_each(Vec::clear);
        let [data, scales, biases] = &mut self.out;
        for bytes in self.bytes.chunks_exact(origin.row_bytes()) {
            origin.read(bytes, &mut self.row);
            let Kind::Matrix(format) = part.kind else {
                write_floats(&part.tensors[0].dtype, &self.row, data);
                continue;
            };
            self.row.iter_mut().for_each(|w| *w = bf16::from_f32(*w).to_f32());
            let groups = origin.cols / GROUP_SIZE * size_of::<bf16>();
            quantize_row(
                format,
                rounding,
                &self.row,
                AffineRow {
                    data: grow(data, format.row_bytes(origin.cols)),
                    scales: grow(scales, groups),
                    biases: grow(biases, groups),
                },
            )?;
        }
        Ok(())
    }
}

/// `more` zeros at the end of `bytes`.
fn grow(bytes: &mut Vec<u8>, more: usize) -> &mut [u8] {
    let start = bytes.len();
    bytes.resize(start + more, 0);
    &mut bytes[start..]
}

/// Appends `values` as `dtype`.
fn write_floats(dtype: &Dtype, values: &[f32], out: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => out.extend(values.iter().flat_map(|w| w.to_le_bytes())),
        Dtype::F16 => out.extend(values.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes())),
        _ => out.extend(values.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes())),
    }
}

/// Why `path` could not be written, and what to do where the disk is full.
pub fn write_failed(path: &Path, reason: io::Error) -> ModelError {
    match reason.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            ModelError::file(
                path.display().to_string(),
                "the disk is full; make room and run the same command again, which goes on after the weight files that \
                 are whole",
            )
        }
        _ => write_error(path, reason),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
