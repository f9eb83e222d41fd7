//! Divides a group of products among the threads of the pool.

use super::{MatmulJob, Output, TileKernel, TileTable};
use crate::activations::{Activations, PANEL, panel_width};
use crate::pack::TILE_ROWS;
use crate::pool::ThreadPool;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of inputs that a block of tokens may take, so that they stay in a core's second-level cache.
const INPUT_BYTES: usize = 384 << 10;
/// A thread takes this part of its fair share of what is left: long runs of weights while there is much, so that
/// fetching ahead pays; single tiles at the end, so that all threads finish together, also when one of them is slow.
const SHARE: usize = 4;

/// Hands out `0..n` in pieces that shrink towards the end.
struct Shrinking {
    next: AtomicUsize,
    n: usize,
    /// Pieces that what is left is thought to be cut in.
    pieces: usize,
}

impl Shrinking {
    fn new(n: usize, threads: usize) -> Self {
        Self { next: AtomicUsize::new(0), n, pieces: threads * SHARE }
    }

    /// The next piece, or `None` when all are taken.
    fn take(&self) -> Option<Range<usize>> {
        let end = |start: usize| start + (self.n - start).div_ceil(self.pieces);
        // Relaxed: the counter only divides the work; the pool's fork and join order the data.
        let taken = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |start| (start < self.n).then(|| end(start)));
        taken.ok().map(|start| start..end(start))
    }
}

/// Computes all jobs, whose shapes have been checked.
pub(super) fn run(tables: &TileTable, pool: &ThreadPool, inputs: &Activations, jobs: &mut [MatmulJob<'_>]) {
    // Floating-point weights have the same kernel in every table.
    let kernels = &tables[inputs.forms().codes.map_or(0, |codes| codes as usize)];
    let tiles: usize = jobs.iter().map(|job| job.weight.tiles()).sum();
    let token_words = jobs.iter().map(|job| inputs.token_words(job.weight.format())).max();
    let panel_bytes = PANEL * size_of::<i32>() * token_words.unwrap_or(0);
    if tiles == 0 || inputs.panels() == 0 {
        return;
    }
    let block = INPUT_BYTES.checked_div(panel_bytes).unwrap_or(1).max(1);
    // Items count the tiles block after block of tokens, so that all threads use the same inputs at a time.
    let items = tiles * inputs.panels().div_ceil(block);
    let queue = Shrinking::new(items, pool.threads());
    let jobs = &*jobs;
    pool.run(&|_thread| {
        while let Some(piece) = queue.take() {
            for item in piece {
                let first = item / tiles * block;
                let (job, tile) = locate(jobs, item % tiles);
                multiply(kernels, inputs, job, tile, first..(first + block).min(inputs.panels()));
            }
        }
    });
}

/// The job and the tile in it that tile `tile` of the group is.
fn locate<'a, 'b>(jobs: &'a [MatmulJob<'b>], mut tile: usize) -> (&'a MatmulJob<'b>, usize) {
    let mut job = &jobs[0];
    for next in jobs {
        job = next;
        match tile.checked_sub(job.weight.tiles()) {
            Some(rest) => tile = rest,
            None => break,
        }
    }
    (job, tile)
}

/// Multiplies one tile with a run of panels and writes the outputs.
fn multiply(
    kernels: &[TileKernel],
    inputs: &Activations,
    job: &MatmulJob<'_>,
    tile: usize,
    panels: Range<usize>,
) {
    let format = job.weight.format();
    let bytes = job.weight.tile(tile);
    let first_row = tile * TILE_ROWS;
    let rows = TILE_ROWS.min(job.weight.rows() - first_row);
    let bias = job.bias.map(|bias| &bias[first_row..first_row + rows]);
    for panel in panels {
        let tokens = inputs.panel_tokens(panel);
        let mut product = [[0.0; TILE_ROWS]; PANEL];
        let kernel = kernels[format as usize];
        // SAFETY: `Kernels` exist only for sets the CPU has; `check` saw that the tile has the inputs' columns and that
        // they are there in the format's form; `run` chose the kernels by the inputs' codes.
        unsafe { kernel(bytes, inputs.panel(panel, format), &mut product[..panel_width(tokens)]) };
        for (token, product) in product[..tokens].iter_mut().enumerate() {
            if let Some(bias) = bias {
                product.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
            let start = (panel * PANEL + token) * job.weight.rows() + first_row;
            // SAFETY: this thread alone has this tile of this job and these tokens.
            let out = unsafe { job.out.part(start, rows) };
            match job.output {
                Output::Store => out.copy_from_slice(&product[..rows]),
                Output::Add => out.iter_mut().zip(&*product).for_each(|(o, y)| *o += y),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every item is handed out once, in order, in pieces that never grow.
        #[test]
        fn shrinking_pieces_tile_the_range(n in 0usize..5000, threads in 1usize..20) {
            let queue = Shrinking::new(n, threads);
            let (mut end, mut last) = (0, usize::MAX);
            while let Some(piece) = queue.take() {
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty() && piece.len() <= last);
                (end, last) = (piece.end, piece.len());
            }
            prop_assert_eq!(end, n);
        }
    }
}
