//! What streams do: copies, fills, kernels and marks.

use super::super::status::{self, Status};
use super::LaneOrder;
use super::abi::{Kernel, Launch};
use super::heap::Owner;
use super::image::Image;
use super::state::{Id, Mark, Object, SHARED_BYTES, State};
use std::ffi::{CStr, c_void};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A kernel together with the object that holds it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    _image: Rc<Image>,
    kernel: *const Kernel,
}

impl Entry {
    /// Looks a kernel up for waves of this size.
    pub fn new(image: &Rc<Image>, name: &CStr, wave: u32) -> Result<Self, Status> {
        Ok(Self { kernel: image.kernel(name, wave)?, _image: Rc::clone(image) })
    }

    /// What the kernel's object says about it.
    pub fn kernel(&self) -> &Kernel {
        // SAFETY: the description lives as long as its image.
        unsafe { &*self.kernel }
    }
}

/// Work of a stream.
#[derive(Debug, Clone)]
pub(super) enum Work {
    Copy { to: usize, from: usize, len: usize },
    PeerCopy { to: usize, from: usize, len: usize },
    Fill { to: usize, value: u8, len: usize },
    Launch { entry: Entry, grid: [u32; 3], block: u32, shared: u32, arguments: Vec<Box<[u64]>> },
    Record { event: Id },
    Wait { event: Id },
}

impl State {
    /// Runs work at once, or notes it when the stream is being captured. Behind a kernel that hangs nothing runs.
    pub fn queue(&mut self, stream: Id, work: Work) -> Result<(), Status> {
        let state = self.stream(stream)?;
        if let Some(captured) = &mut state.capture {
            captured.push(work);
            return self.check_captured(stream);
        }
        if state.hung && !matches!(work, Work::Record { .. }) {
            return Ok(());
        }
        self.run(stream, work)
    }

    /// A copy from or to pageable memory cannot be captured: drivers read such memory when the copy is queued.
    fn check_captured(&mut self, stream: Id) -> Result<(), Status> {
        let Some(Work::Copy { to, from, len }) =
            self.stream(stream)?.capture.as_ref().and_then(|work| work.last().cloned())
        else {
            return Ok(());
        };
        let known = self.heap.owner(to, len)?.is_some() && self.heap.owner(from, len)?.is_some();
        if known { Ok(()) } else { Err(status::CAPTURE_UNSUPPORTED) }
    }

    fn run(&mut self, stream: Id, work: Work) -> Result<(), Status> {
        match work {
            Work::Copy { to, from, len } => {
                let started = Instant::now();
                copy(to, from, len);
                let ends = self.ends(to, from, len)?;
                if let (Some(_), None) = ends {
                    self.counters.uploaded += len as u64;
                }
                wait_until(started, self.copy_time(ends, len));
            }
            Work::PeerCopy { to, from, len } => {
                copy(to, from, len);
                if self.settings.faults.garble_peer && len > 0 {
                    fill(to + len / 2, 0x5a, len - len / 2);
                }
            }
            Work::Fill { to, value, len } => fill(to, value, len),
            Work::Launch { entry, grid, block, shared, mut arguments } => {
                self.counters.launches += 1;
                if self.settings.faults.hang_launch == Some(self.counters.launches) {
                    self.stream(stream)?.hung = true;
                } else {
                    self.launch(&entry, grid, block, shared, &mut arguments);
                }
            }
            Work::Record { event } => {
                let mark = if self.stream(stream)?.hung { Mark::Hung } else { Mark::At(Instant::now()) };
                match self.objects.get_mut(&event) {
                    Some(Object::Event(slot)) => *slot = mark,
                    _ => return Err(status::INVALID_HANDLE),
                }
            }
            Work::Wait { event } => {
                if matches!(self.mark(event)?, Mark::Hung) {
                    self.stream(stream)?.hung = true;
                }
            }
        }
        Ok(())
    }

    /// The devices that a copy goes to and comes from; `None` for the host.
    fn ends(&self, to: usize, from: usize, len: usize) -> Result<(Option<u32>, Option<u32>), Status> {
        let on_device = |owner| match owner {
            Some(Owner::Device(ordinal)) => Some(ordinal),
            _ => None,
        };
        Ok((on_device(self.heap.owner(to, len)?), on_device(self.heap.owner(from, len)?)))
    }

    /// How long a copy takes at least, by the settings: nothing where they do not say.
    fn copy_time(&self, ends: (Option<u32>, Option<u32>), len: usize) -> Duration {
        let (rates, ordinal, moved) = match ends {
            // Inside a device every byte is read and written.
            (Some(ordinal), Some(_)) => (&self.settings.bandwidth, ordinal, 2 * len),
            (Some(ordinal), None) | (None, Some(ordinal)) => (&self.settings.link, ordinal, len),
            (None, None) => return Duration::ZERO,
        };
        let rate = rates.as_ref().and_then(|rates| rates.of(ordinal));
        let seconds = rate.map_or(0.0, |rate| moved as f64 / rate as f64);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// A kernel that fails is noticed later, as on a device: by the next call.
    fn launch(
        &mut self,
        entry: &Entry,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        arguments: &mut [Box<[u64]>],
    ) {
        if self.settings.faults.fail_launch == Some(self.counters.launches) {
            self.lost = Some(status::LAUNCH_FAILURE);
            return;
        }
        let kernel = entry.kernel();
        let (order, seed) = match self.settings.order {
            LaneOrder::Forward => (0, 0),
            LaneOrder::Reverse => (1, 0),
            LaneOrder::Random(seed) => (2, seed),
        };
        let mut message = [0u8; 256];
        let launch = Launch {
            grid,
            block: [block, 1, 1],
            dynamic_shared: shared,
            shared_limit: SHARED_BYTES,
            order,
            seed,
            stacks: self
                .stacks
                .at_least(block as usize * usize::try_from(kernel.stack_bytes).unwrap_or(usize::MAX)),
            message: message.as_mut_ptr().cast(),
            message_bytes: message.len() as u64,
        };
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| argument.as_mut_ptr().cast()).collect();
        // SAFETY: the object was compiled from our sources for this structure; arguments have the sizes it declares, and
        // what they point at is the launch's caller's promise.
        let result = unsafe { (kernel.launch)(&launch, pointers.as_mut_ptr()) };
        if result != 0 {
            self.message = CStr::from_bytes_until_nul(&message).ok().map(CStr::to_owned);
            tracing::error!(reason = ?self.message, "a kernel failed on the emulated device");
            self.lost = Some(status::LAUNCH_FAILURE);
        }
    }

    /// Checks a launch as a driver does, and copies its arguments.
    ///
    /// # Safety
    /// `arguments` points at as many pointers as the kernel has parameters, each at that parameter's value.
    pub unsafe fn prepare_launch(
        &self,
        function: Id,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        arguments: *const *const c_void,
    ) -> Result<Work, Status> {
        let entry = self.entry(function)?.clone();
        let kernel = entry.kernel();
        let whole = block[0] > 0 && block[0].is_multiple_of(kernel.wave) && block[1..] == [1, 1];
        if !whole || block[0] > kernel.max_threads || grid.contains(&0) {
            return Err(status::INVALID_CONFIGURATION);
        }
        if shared > SHARED_BYTES {
            return Err(status::INVALID_VALUE);
        }
        let copied = (0..kernel.parameters as usize).map(|i| {
            // SAFETY: the object declares this many sizes, and the caller passes this many values of those sizes.
            unsafe {
                let bytes = *kernel.parameter_bytes.add(i) as usize;
                let mut words = vec![0u64; bytes.div_ceil(8)].into_boxed_slice();
                std::ptr::copy_nonoverlapping(
                    (*arguments.add(i)).cast::<u8>(),
                    words.as_mut_ptr().cast::<u8>(),
                    bytes,
                );
                words
            }
        });
        let arguments = copied.collect();
        Ok(Work::Launch { entry, grid, block: block[0], shared, arguments })
    }
}

/// Waits until `time` has passed since `start`.
fn wait_until(start: Instant, time: Duration) {
    while let Some(left) = time.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
        std::thread::park_timeout(left);
    }
}

/// Copies between ranges that were checked when the copy was queued; they may overlap.
fn copy(to: usize, from: usize, len: usize) {
    // SAFETY: known ranges are live allocations; unknown ones are host memory that the caller of hipMemcpy vouches for.
    unsafe {
        std::ptr::copy(
            std::ptr::with_exposed_provenance::<u8>(from),
            std::ptr::with_exposed_provenance_mut::<u8>(to),
            len,
        );
    }
}

fn fill(to: usize, value: u8, len: usize) {
    // SAFETY: as in `copy`.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(to).write_bytes(value, len) };
}

/// Stacks of the threads of a block, kept from launch to launch.
#[derive(Debug, Default)]
pub(super) struct Stacks(Vec<Page>);

#[derive(Debug, Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Stacks {
    fn at_least(&mut self, bytes: usize) -> *mut u8 {
        let pages = bytes.div_ceil(size_of::<Page>());
        if self.0.capacity() < pages {
            self.0 = Vec::with_capacity(pages);
        }
        self.0.as_mut_ptr().cast()
    }
}
