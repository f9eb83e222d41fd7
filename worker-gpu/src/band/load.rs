//! Loading: from the model file through page-locked memory to the device.
//!
//! A matrix is cut into pieces of whole tiles. Threads repack one piece into page-locked memory while the device copies
//! the pieces before it and the system reads the weight ahead; the memory in between is bounded, and nothing is
//! copied straight from the mapped file. Weights that stay in host memory are repacked right into their place.

use super::error::BandError;
use super::mapped::{Place, Store, mapped_bytes};
use super::needs::{UPLOAD_PIECE, UPLOAD_PIECES};
use super::staging::Staging;
use crate::hip::{Device, DeviceSlice, Stream};
use crate::launch::Matrix;
use spillway_kernels::device_layout::{DeviceLayout, TILE_ROWS};
use spillway_kernels::formats::FormatError;
use spillway_kernels::pool::ThreadPool;
use spillway_model::file::{ModelFile, Weight};
use spillway_model::gguf::Advice;
use spillway_model::program::{Layer, Step, WeightRef};
use spillway_worker::LoadProgress;
use spillway_worker::weights::{self, WeightError, format_of};

/// Most threads that repack.
const MAX_THREADS: usize = 16;

/// A weight and the form in which it is stored.
#[derive(Debug, Clone, Copy)]
pub(super) enum Need<'a> {
    /// Repacked for the matrix kernels.
    Matrix(&'a WeightRef),
    /// Decoded to f32.
    Values(&'a WeightRef),
}

impl<'a> Need<'a> {
    /// The weights of a layer.
    pub fn of_layer(layer: &'a Layer) -> Vec<Self> {
        let of_step = |step: &'a Step| match step {
            Step::Linear { weight, bias, .. } => {
                std::iter::once(Need::Matrix(weight)).chain(bias.iter().map(Need::Values)).collect()
            }
            Step::GatedMlp { gate, up, down, .. } => [gate, up, down].map(Need::Matrix).to_vec(),
            other => other.weights().into_iter().map(Need::Values).collect(),
        };
        layer.steps.iter().flat_map(of_step).collect()
    }

    /// Bytes of a layer's weights in a block of host memory.
    pub fn mapped_bytes(layer: &'a Layer, model: &ModelFile) -> Result<u64, BandError> {
        let needs = Self::of_layer(layer).into_iter();
        needs.map(|need| Ok(mapped_bytes(need.stored_bytes(model)?))).sum()
    }

    /// Bytes of a weight as stored.
    pub fn stored_bytes(self, model: &ModelFile) -> Result<u64, BandError> {
        let bytes = match self {
            Need::Values(weight) => weight.rows * weight.cols * size_of::<f32>(),
            Need::Matrix(weight) => layout(weight, &model.weight(weight)?)?.matrix_bytes(weight.rows)?,
        };
        Ok(bytes as u64)
    }
}

fn layout(weight: &WeightRef, source: &Weight<'_>) -> Result<DeviceLayout, BandError> {
    Ok(DeviceLayout::new(format_of(weight, source)?, weight.cols).map_err(WeightError::named(weight))?)
}

/// Uploads the weights of a band.
pub(super) struct Loader<'a, 'p> {
    model: &'a ModelFile,
    stream: &'a Stream,
    progress: &'a mut LoadProgress<'p>,
    pieces: [Staging; UPLOAD_PIECES],
    /// The piece to fill next.
    next: usize,
    pool: ThreadPool,
    done: u64,
    total: u64,
}

impl<'a, 'p> Loader<'a, 'p> {
    /// A loader for exactly the weights of `needs`.
    pub fn new(
        model: &'a ModelFile,
        device: &Device,
        stream: &'a Stream,
        needs: &[Need<'_>],
        progress: &'a mut LoadProgress<'p>,
    ) -> Result<Self, BandError> {
        let mut total = 0;
        for need in needs {
            total += need.stored_bytes(model)?;
        }
        let piece = || Staging::new(device, "weights on their way", UPLOAD_PIECE);
        // Two threads of a core are faster than one: they wait for memory most of the time.
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let pool = ThreadPool::new(threads)?;
        let pieces = [piece()?, piece()?, piece()?];
        Ok(Self { model, stream, progress, pieces, next: 0, pool, done: 0, total })
    }

    /// Bytes stored so far.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Says that the load goes on, or finds that it must not.
    pub fn tell(&mut self) -> Result<(), BandError> {
        if (self.progress)(self.done, self.total).is_break() { Err(BandError::Cancelled) } else { Ok(()) }
    }

    /// A matrix in the device's layout.
    pub fn matrix(&mut self, mut store: Store<'_>, weight: &WeightRef) -> Result<Matrix, BandError> {
        let source = self.model.weight(weight)?;
        self.model.gguf().advise(source.info, Advice::WillNeed);
        let layout = layout(weight, &source)?;
        let mut place = store.allocate(&weight.name, layout.matrix_bytes(weight.rows)?)?;
        let tile_rows_bytes = TILE_ROWS * layout.format().row_bytes(weight.cols)?;
        let tiles_per_piece = UPLOAD_PIECE / layout.tile_bytes();
        if tiles_per_piece == 0 {
            return Err(BandError::Launch(too_wide(weight)));
        }
        let mut uploaded = 0;
        for rows in source.bytes.chunks(tiles_per_piece * tile_rows_bytes) {
            let bytes = rows.len().div_ceil(tile_rows_bytes) * layout.tile_bytes();
            self.piece(&mut place, uploaded, bytes, |piece, pool| layout.repack(pool, rows, piece))?;
            uploaded += bytes;
        }
        self.model.gguf().advise(source.info, Advice::DontNeed);
        Ok(Matrix::new(layout, weight.rows, place.on_device)?)
    }

    /// A vector or a small table, decoded to f32.
    pub fn values(&mut self, mut store: Store<'_>, weight: &WeightRef) -> Result<DeviceSlice, BandError> {
        let source = self.model.weight(weight)?;
        let values = weights::decode(weight, &source)?;
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let mut place = store.allocate(&weight.name, bytes.len())?;
        for (number, part) in bytes.chunks(UPLOAD_PIECE).enumerate() {
            self.piece(&mut place, number * UPLOAD_PIECE, part.len(), |piece, _| {
                piece.copy_from_slice(part);
                Ok(())
            })?;
        }
        Ok(place.on_device)
    }

    /// Fills `bytes` bytes of a weight at `offset`: in place, or through the next piece.
    fn piece(
        &mut self,
        to: &mut Place,
        offset: usize,
        bytes: usize,
        fill: impl FnOnce(&mut [u8], &ThreadPool) -> Result<(), FormatError>,
    ) -> Result<(), BandError> {
        if let Some(part) = to.host_part(offset, bytes)? {
            fill(part, &self.pool)?;
        } else {
            let piece = &mut self.pieces[self.next];
            self.next = (self.next + 1) % UPLOAD_PIECES;
            fill(&mut piece.bytes_mut()?[..bytes], &self.pool)?;
            piece.upload(self.stream, 0, to.on_device.part(offset, bytes)?)?;
        }
        self.done += bytes as u64;
        self.tell()
    }
}

fn too_wide(weight: &WeightRef) -> crate::launch::LaunchError {
    crate::launch::LaunchError::Unsupported {
        operation: "load",
        what: "columns of a matrix",
        got: weight.cols,
        rule: "few enough that 16 rows fit into 16 MiB",
    }
}
