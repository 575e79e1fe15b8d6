//! What the fast forms of the stages share: the machine they run on, activations, projections.

use lily_engine::backend::BackendError;
use lily_model::weights::{GROUP_SIZE, MatrixView};

use crate::isa::Isa;
use crate::kernels::OutRows;
use crate::kernels::activations::QuantizedRows;
use crate::kernels::f32_ops;
use crate::kernels::matmul::{Next, ROW_BLOCK, matmul_rows_f32, matmul_rows_then};
use crate::memory::grow;
use crate::pool::ThreadPool;

/// Fewest weight rows of a pool task.
pub const LEAST_TASK_ROWS: usize = 2 * ROW_BLOCK;

/// Most weight rows of a pool task.
const MOST_TASK_ROWS: usize = 64 * ROW_BLOCK;

/// Pool tasks for each thread: enough that none waits long for the last one.
const TASKS_PER_THREAD: usize = 4;

/// Tokens whose f32 activations stay in the L2 cache while all rows of a task meet them.
const F32_TOKENS: usize = 32;

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
    /// Weight rows of each pool task where `total` rows are to be multiplied.
    ///
    /// Each task begins with reads that nothing has asked the memory for, so that long ones are better; all
    /// threads should end together, so that short ones are. The result does not depend on it.
    pub fn task_rows(&self, total: usize) -> usize {
        (total / (self.pool.threads() * TASKS_PER_THREAD))
            .next_multiple_of(LEAST_TASK_ROWS)
            .clamp(LEAST_TASK_ROWS, MOST_TASK_ROWS)
    }

    /// As [`Machine::task_rows`] where each task reads many matrices, the same for all: one task per thread.
    pub fn even_task_rows(&self, total: usize) -> usize {
        total.div_ceil(self.pool.threads()).next_multiple_of(LEAST_TASK_ROWS)
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
    values: Vec<f32>,
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
        grow("activations", &mut self.values, rows * width)?;
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

    /// The rows as f32, to be written; [`Activations::quantize`] follows.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.rows * self.width]
    }

    /// Makes the int8 rows from the f32 ones.
    pub fn quantize(&mut self, machine: &Machine) {
        self.fill(machine, |_, _| {});
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
        let values = OutRows::new(&mut self.values[..rows * width], width);
        let quantized = width.is_multiple_of(GROUP_SIZE).then(|| self.quantized.writer());
        machine.each_row(rows, |row| {
            // SAFETY: each row is one task's.
            unsafe {
                let out = values.row(row, 0..width);
                write(row, out);
                if let Some(quantized) = &quantized {
                    quantized.quantize_row(machine.isa, row, out);
                }
            }
        });
    }

    /// The indices of rows `range`, as [`Activations::multiply`] takes them.
    pub fn indices(&self, range: std::ops::Range<usize>) -> &[u32] {
        &self.indices[range]
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
        rows: std::ops::Range<usize>,
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

/// `x *= silu(gate)`.
pub fn silu_gate(isa: Isa, gate: &[f32], x: &mut [f32]) {
    f32_ops::sigmoid_gate(isa, gate, x);
    for (x, gate) in x.iter_mut().zip(gate) {
        *x *= gate;
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
    let task_rows = machine.task_rows(jobs.iter().map(|(matrix, ..)| matrix.rows).sum());
    let tasks = jobs.iter().map(|(matrix, ..)| matrix.rows.div_ceil(task_rows)).sum();
    machine.pool.for_each(tasks, |task| {
        let mut block = task;
        for (matrix, precision, out) in jobs {
            let blocks = matrix.rows.div_ceil(task_rows);
            if block >= blocks {
                block -= blocks;
                continue;
            }
            let rows = block * task_rows..matrix.rows.min((block + 1) * task_rows);
            // SAFETY: each block of rows of each matrix is one task's.
            unsafe {
                match precision {
                    Precision::Int8 => x.multiply(machine, matrix, rows, tokens, out, Next::UNKNOWN),
                    Precision::F32 => {
                        for (i, tokens) in tokens.chunks(F32_TOKENS).enumerate() {
                            let out = out.from_row(i * F32_TOKENS);
                            matmul_rows_f32(machine.isa, matrix, rows.clone(), x.values(), tokens, out);
                        }
                    }
                }
            }
            return;
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
    let task_rows = machine.task_rows(matrix.rows);
    machine.pool.for_each(matrix.rows.div_ceil(task_rows), |task| {
        let rows = task * task_rows..matrix.rows.min((task + 1) * task_rows);
        // SAFETY: each block of columns of both outputs is one task's.
        unsafe {
            x.multiply(machine, matrix, rows.clone(), tokens, product, Next::UNKNOWN);
            for row in 0..tokens.len() {
                let sum = residual.row(row, rows.clone());
                for (sum, value) in sum.iter_mut().zip(product.row(row, rows.clone())) {
                    *sum += *value;
                }
            }
        }
    });
}
