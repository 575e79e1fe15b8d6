//! What the fast forms of the stages share: the machine they run on, activations, projections.

use std::ops::Range;

use lily_engine::backend::BackendError;
use lily_model::weights::{GROUP_SIZE, MatrixView};

use crate::isa::Isa;
use crate::kernels::OutRows;
use crate::kernels::activations::{QuantizedRows, RowWriter};
use crate::kernels::f32_ops;
use crate::kernels::matmul::{Next, ROW_BLOCK, matmul_rows_f32, matmul_rows_of_two, matmul_rows_then};
use crate::memory::Buffer;
use crate::pool::ThreadPool;

/// Weight rows of a pool task: some microseconds of decode, so that the threads end together, and a whole number
/// of the tiles that prefill unpacks.
pub const TASK_ROWS: usize = 4 * ROW_BLOCK;

/// The same for many tokens at the most: what is done once for a task's tokens counts for less then.
const WIDE_TASK_ROWS: usize = 4 * TASK_ROWS;
/// Tokens from which on they count as many.
const MANY_TOKENS: usize = 16;
/// Tasks of each thread at the least, so that the threads end together.
const TASKS: usize = 4;

/// The same where activations stay f32: matrices of few rows.
const F32_TASK_ROWS: usize = ROW_BLOCK;

/// A task's rows become columns of activations that it quantizes by itself.
const _: () = assert!(TASK_ROWS.is_multiple_of(GROUP_SIZE));

/// Rows of activations below which a fork costs more than it saves.
const FORK_ROWS: usize = 8;

/// Threads and instructions.
pub struct Machine {
    /// The threads.
    pub pool: ThreadPool,
    /// The instructions.
    pub isa: Isa,
}

impl Machine {
    /// Weight rows of a task where `tokens` tokens meet `rows` rows.
    pub fn task_rows(&self, tokens: usize, rows: usize) -> usize {
        if tokens < MANY_TOKENS {
            return TASK_ROWS;
        }
        (rows / (TASKS * self.pool.threads())).next_multiple_of(TASK_ROWS).clamp(TASK_ROWS, WIDE_TASK_ROWS)
    }

    /// Weight rows of a task where `tokens` tokens meet `matrices` matrices of `rows` rows, each on its own. A task of few tokens
    /// that has more of a matrix is faster, because every matrix is a new beginning, where no thread gets more rows by it.
    pub fn task_rows_of_each(&self, tokens: usize, matrices: usize, rows: usize) -> usize {
        const WIDER: usize = 2 * TASK_ROWS;
        let share =
            |task_rows| (matrices * rows.div_ceil(task_rows)).div_ceil(self.pool.threads()) * task_rows;
        if tokens >= MANY_TOKENS {
            self.task_rows(tokens, matrices * rows)
        } else if share(WIDER) <= share(TASK_ROWS) {
            WIDER
        } else {
            TASK_ROWS
        }
    }

    /// Weight rows of a task that goes through the same rows of many matrices: two tasks for each thread, because
    /// every matrix is a new beginning, and no fewer rows than [`TASK_ROWS`].
    pub fn wide_task_rows(&self, rows: usize) -> usize {
        (rows / (2 * self.pool.threads())).next_multiple_of(TASK_ROWS).max(TASK_ROWS)
    }

    /// `task(index)` for every `index < count`, on all threads where there are enough to be worth it.
    pub fn each_row(&self, count: usize, task: impl Fn(usize) + Sync) {
        if count < FORK_ROWS {
            (0..count).for_each(task);
        } else {
            self.pool.for_each(count, task);
        }
    }
}

/// Rows that projections read: as f32, and as int8 where the width has whole groups.
#[derive(Default)]
pub struct Activations {
    width: usize,
    rows: usize,
    /// `[rows, width]`.
    values: Buffer<f32>,
    quantized: QuantizedRows,
    /// 0, 1, 2, ...: token lists of consecutive rows are ranges of it.
    indices: Vec<u32>,
}

impl Activations {
    /// Bytes that [`Activations::reserve`] takes.
    pub fn bytes(rows: usize, width: usize) -> usize {
        let indices = rows * size_of::<u32>();
        rows * width * size_of::<f32>() + indices + QuantizedRows::bytes(rows, width)
    }

    /// Makes room for `rows` rows of `width`; what they hold is unspecified.
    pub fn reserve(&mut self, rows: usize, width: usize) -> Result<(), BackendError> {
        self.values.grow("activations", rows * width)?;
        self.width = width;
        let known = self.indices.len();
        self.indices.extend(known as u32..rows.max(known) as u32);
        self.set_rows(rows);
        Ok(())
    }

    /// Says how many rows there are, at most as many as were ever reserved.
    pub fn set_rows(&mut self, rows: usize) {
        self.rows = rows;
        if self.width.is_multiple_of(GROUP_SIZE) {
            self.quantized.resize(rows, self.width);
        }
    }

    /// The rows as f32, `[rows, width]`.
    pub fn values(&self) -> &[f32] {
        &self.values[..self.rows * self.width]
    }

    /// For threads that write each their own columns.
    pub fn writer(&mut self) -> ActivationsWriter<'_> {
        let (rows, width) = (self.rows, self.width);
        let quantized = width.is_multiple_of(GROUP_SIZE).then(|| self.quantized.writer());
        ActivationsWriter { values: OutRows::new(&mut self.values[..rows * width], width), quantized }
    }

    /// Writes the RMS norm of each row of `x` `[rows, width]`.
    pub fn norm(&mut self, machine: &Machine, x: &[f32], weight: &[f32], eps: f32) {
        let width = self.width;
        self.fill(machine, |row, out| {
            f32_ops::rms_norm(machine.isa, &x[row * width..(row + 1) * width], weight, eps, out);
        });
    }

    /// Lets `write` work on each f32 row, then quantizes it.
    pub fn fill(&mut self, machine: &Machine, write: impl Fn(usize, &mut [f32]) + Sync) {
        let (rows, width) = (self.rows, self.width);
        let writer = self.writer();
        machine.each_row(rows, |row| {
            // SAFETY: each row is one task's.
            unsafe { writer.fill(machine.isa, row, 0..width, |out| write(row, out)) };
        });
    }

    /// The indices of rows `range`, as [`Activations::multiply`] takes them.
    pub fn indices(&self, range: Range<usize>) -> &[u32] {
        &self.indices[range]
    }

    /// As [`Activations::multiply`] for two matrices of equal width and their outputs.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn multiply_two(
        &self,
        machine: &Machine,
        matrices: [MatrixView<'_>; 2],
        rows: Range<usize>,
        tokens: &[u32],
        out: [OutRows<'_>; 2],
        next: Next,
    ) {
        // SAFETY: by contract.
        unsafe {
            if matrices.iter().all(|matrix| matrix.format.is_affine()) {
                matmul_rows_of_two(machine.isa, matrices, rows, &self.quantized, tokens, out, next);
            } else {
                for (matrix, out) in matrices.into_iter().zip(out) {
                    self.multiply(machine, matrix, rows.clone(), tokens, out, Next::UNKNOWN);
                }
            }
        }
    }

    /// Rows `rows` of `matrix` times the activations `tokens`, in the form that the matrix's format asks for;
    /// `next` is what this thread multiplies afterwards.
    ///
    /// # Safety
    /// As [`matmul_rows_then`]: columns `rows` of `out` are this call's alone.
    pub unsafe fn multiply(
        &self,
        machine: &Machine,
        matrix: MatrixView<'_>,
        rows: Range<usize>,
        tokens: &[u32],
        out: OutRows<'_>,
        next: Next,
    ) {
        // SAFETY: by contract.
        unsafe {
            if matrix.format.is_affine() {
                matmul_rows_then(machine.isa, matrix, rows, &self.quantized, tokens, out, next);
            } else {
                matmul_rows_f32(machine.isa, matrix, rows, self.values(), tokens, out);
            }
        }
    }
}

/// Access to all rows of [`Activations`] for several threads.
#[derive(Clone, Copy)]
pub struct ActivationsWriter<'a> {
    values: OutRows<'a>,
    quantized: Option<RowWriter<'a>>,
}

impl<'a> ActivationsWriter<'a> {
    /// The f32 rows. What is written there is quantized by [`ActivationsWriter::fill`].
    pub fn values(&self) -> OutRows<'a> {
        self.values
    }

    /// Lets `write` work on columns `cols` of the f32 row, whole groups of them, then quantizes them.
    ///
    /// # Safety
    /// No other thread touches these columns of this row meanwhile.
    pub unsafe fn fill(&self, isa: Isa, row: usize, cols: Range<usize>, write: impl FnOnce(&mut [f32])) {
        // SAFETY: by contract.
        unsafe {
            let out = self.values.row(row, cols.clone());
            write(out);
            if let Some(quantized) = &self.quantized {
                quantized.quantize_part(isa, row, cols.start, out);
            }
        }
    }
}

/// Whether a projection may round its activations to int8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// int8 where the matrix is affine.
    Int8,
    /// f32 always: for the few small projections whose error is not averaged away.
    F32,
}

/// One matrix of a stage and where its product goes, `[rows of x, matrix.rows]`.
pub struct Projection<'a> {
    /// The matrix.
    pub matrix: MatrixView<'a>,
    /// Its output.
    pub out: &'a mut [f32],
    /// Its activations.
    pub precision: Precision,
}

/// All `projections` of `x` in one fork: their rows together are shared out in blocks.
pub fn project<const N: usize>(machine: &Machine, x: &Activations, projections: [Projection<'_>; N]) {
    let tokens = x.indices(0..x.rows);
    let jobs = projections.map(|p| (p.matrix, p.precision, OutRows::new(p.out, p.matrix.rows)));
    let all = jobs.iter().map(|(matrix, ..)| matrix.rows).sum();
    let wide = machine.task_rows(x.rows, all);
    let task_rows = |precision| match precision {
        Precision::Int8 => wide,
        Precision::F32 => F32_TASK_ROWS,
    };
    let tasks_of = |job: usize| jobs[job].0.rows.div_ceil(task_rows(jobs[job].1));
    // Which projection a task belongs to, and which of its rows the task multiplies.
    let locate = |mut task: usize| {
        let mut job = 0;
        while task >= tasks_of(job) {
            task -= tasks_of(job);
            job += 1;
        }
        let (matrix, precision, _) = jobs[job];
        let rows = task_rows(precision);
        (jobs[job], task * rows..matrix.rows.min((task + 1) * rows))
    };
    let tasks = (0..N).map(tasks_of).sum();
    machine.pool.for_each_in_runs(tasks, |task, next| {
        let ((matrix, precision, out), rows) = locate(task);
        // SAFETY: each block of rows of each matrix is one task's.
        unsafe {
            match precision {
                Precision::Int8 => {
                    let next = next.map_or(Next::UNKNOWN, |next| {
                        let ((matrix, ..), rows) = locate(next);
                        Next::rows(&matrix, rows.start)
                    });
                    x.multiply(machine, matrix, rows, tokens, out, next);
                }
                Precision::F32 => matmul_rows_f32(machine.isa, matrix, rows, x.values(), tokens, out),
            }
        }
    });
}

/// `residual += matrix x` for every row; `product` `[rows of x, matrix.rows]` is scratch.
pub fn project_onto(
    machine: &Machine,
    x: &Activations,
    matrix: MatrixView<'_>,
    product: &mut [f32],
    residual: &mut [f32],
) {
    let tokens = x.indices(0..x.rows);
    let product = OutRows::new(product, matrix.rows);
    let residual = OutRows::new(residual, matrix.rows);
    let task_rows = machine.task_rows(x.rows, matrix.rows);
    machine.pool.for_each_in_runs(matrix.rows.div_ceil(task_rows), |task, next| {
        let rows = task * task_rows..matrix.rows.min((task + 1) * task_rows);
        let next = next.map_or(Next::UNKNOWN, |next| Next::rows(&matrix, next * task_rows));
        // SAFETY: each block of columns of both outputs is one task's.
        unsafe {
            x.multiply(machine, matrix, rows.clone(), tokens, product, next);
            for row in 0..tokens.len() {
                let (product, sum) = (product.row(row, rows.clone()), residual.row(row, rows.clone()));
                f32_ops::axpy(machine.isa, 1.0, product, sum);
            }
        }
    });
}
