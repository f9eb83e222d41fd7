//! The emulated driver: devices, objects, and work.

use super::super::api::CopyKind;
use super::super::properties::{DeviceInfo, PciAddress};
use super::super::status::{self, Status};
use super::abi::{Kernel, Launch};
use super::heap::{Heap, Owner};
use super::image::Image;
use super::{Counters, LaneOrder, Settings};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::rc::Rc;
use std::time::Instant;

/// Shared memory of a block, as much as the smallest real device has.
pub(super) const SHARED_BYTES: u32 = 64 << 10;

/// Number of a stream, event, module, function or graph; given out as an opaque handle.
pub(super) type Id = usize;

/// A kernel together with the object that holds it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    _image: Rc<Image>,
    kernel: *const Kernel,
}

impl Entry {
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

#[derive(Debug, Default)]
pub(super) struct StreamState {
    capture: Option<Vec<Work>>,
    hung: bool,
}

/// When an event's stream came to it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mark {
    Never,
    At(Instant),
    Hung,
}

#[derive(Debug)]
pub(super) enum Object {
    Stream(StreamState),
    Event(Mark),
    Module(Rc<Image>),
    Function(Entry, Id),
    Graph(Rc<[Work]>),
    GraphExec(Rc<[Work]>),
}

#[derive(Debug)]
pub(super) struct State {
    settings: Settings,
    heap: Heap,
    objects: BTreeMap<Id, Object>,
    next: Id,
    current: u32,
    counters: Counters,
    lost: Option<Status>,
    message: Option<CString>,
    stacks: Stacks,
}

impl State {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            heap: Heap::default(),
            objects: BTreeMap::new(),
            // Handles look like addresses that nothing is mapped at.
            next: 0x100,
            current: 0,
            counters: Counters::default(),
            lost: None,
            message: None,
            stacks: Stacks::default(),
        }
    }

    pub fn counters(&self) -> Counters {
        let functions = self.objects.values().filter(|object| matches!(object, Object::Function(..))).count();
        Counters { live: self.heap.len() + self.objects.len() - functions, ..self.counters }
    }

    /// Counts a call; fails when the device is gone.
    pub fn enter(&mut self) -> Result<(), Status> {
        self.counters.calls += 1;
        if self.settings.faults.lose_at_call.is_some_and(|nth| self.counters.calls >= nth) {
            self.lost = Some(status::UNKNOWN);
        }
        self.lost.map_or(Ok(()), Err)
    }

    /// Counts a call that takes a resource; fails when its turn has come.
    pub fn take(&mut self) -> Result<(), Status> {
        self.counters.allocations += 1;
        let fails = self.settings.faults.fail_allocation == Some(self.counters.allocations);
        if fails { Err(status::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// What a failed kernel said, for the status that it left.
    pub fn message(&self, status: Status) -> Option<&CStr> {
        self.message.as_deref().filter(|_| self.lost == Some(status))
    }

    // Devices

    pub fn devices(&self) -> u32 {
        self.settings.devices
    }

    pub fn choose(&mut self, ordinal: u32) -> Result<(), Status> {
        self.check_device(ordinal)?;
        self.current = ordinal;
        Ok(())
    }

    pub fn check_device(&self, ordinal: u32) -> Result<(), Status> {
        if ordinal < self.settings.devices { Ok(()) } else { Err(status::INVALID_DEVICE) }
    }

    pub fn describe(&self, ordinal: u32) -> Result<DeviceInfo, Status> {
        self.check_device(ordinal)?;
        Ok(DeviceInfo {
            ordinal,
            name: "Spillway emulated device".to_owned(),
            arch: format!("emulated_wave{}", self.settings.wave),
            uuid: None,
            pci: PciAddress { domain: 0xffff, bus: ordinal, device: 0 },
            total_bytes: self.settings.memory,
            compute_units: 1,
            wave: self.settings.wave,
            shared_bytes: SHARED_BYTES.into(),
            integrated: false,
        })
    }

    /// Free and total bytes of the chosen device.
    pub fn memory(&self) -> (u64, u64) {
        let total = self.settings.memory;
        (total.saturating_sub(self.heap.device_bytes(self.current)), total)
    }

    // Memory

    pub fn malloc(&mut self, len: usize) -> Result<*mut u8, Status> {
        self.take()?;
        if len as u64 > self.memory().0 {
            return Err(status::OUT_OF_MEMORY);
        }
        self.heap.allocate(len, Owner::Device(self.current))
    }

    pub fn host_malloc(&mut self, len: usize) -> Result<*mut u8, Status> {
        self.take()?;
        self.heap.allocate(len, Owner::Pinned)
    }

    pub fn free(&mut self, address: usize) -> Result<(), Status> {
        self.heap.free(address, |owner| matches!(owner, Owner::Device(_)))
    }

    pub fn host_free(&mut self, address: usize) -> Result<(), Status> {
        self.heap.free(address, |owner| owner == Owner::Pinned)
    }

    pub fn register(&mut self, address: usize, len: usize) -> Result<(), Status> {
        self.take()?;
        if self.settings.faults.refuse_register {
            return Err(status::NOT_SUPPORTED);
        }
        self.heap.register(address, len)
    }

    pub fn unregister(&mut self, address: usize) -> Result<(), Status> {
        self.heap.unregister(address)
    }

    /// Host memory that the device may address.
    pub fn check_mapped(&self, address: usize) -> Result<(), Status> {
        match self.heap.owner(address, 1)? {
            Some(Owner::Pinned | Owner::Registered) => Ok(()),
            _ => Err(status::INVALID_VALUE),
        }
    }

    /// Whether a copy's two ends are what its kind says.
    pub fn check_copy(&self, to: usize, from: usize, len: usize, kind: CopyKind) -> Result<(), Status> {
        let (to, from) = (self.heap.owner(to, len)?, self.heap.owner(from, len)?);
        let on_device = |owner: Option<Owner>| owner.is_some();
        let on_host = |owner: Option<Owner>| !matches!(owner, Some(Owner::Device(_)));
        let right = match kind {
            CopyKind::HOST_TO_DEVICE => on_device(to) && on_host(from),
            CopyKind::DEVICE_TO_HOST => on_host(to) && on_device(from),
            CopyKind::DEVICE_TO_DEVICE => on_device(to) && on_device(from),
            _ => false,
        };
        if right { Ok(()) } else { Err(status::INVALID_VALUE) }
    }

    pub fn check_device_range(&self, ordinal: Option<u32>, address: usize, len: usize) -> Result<(), Status> {
        match (self.heap.owner(address, len)?, ordinal) {
            (Some(Owner::Device(owner)), Some(ordinal)) if owner == ordinal => Ok(()),
            (Some(_), None) => Ok(()),
            _ => Err(status::INVALID_VALUE),
        }
    }

    // Objects

    pub fn create(&mut self, object: Object) -> Result<Id, Status> {
        self.take()?;
        Ok(self.insert(object))
    }

    fn insert(&mut self, object: Object) -> Id {
        let id = self.next;
        self.next += 0x10;
        self.objects.insert(id, object);
        id
    }

    /// Removes an object of the kind that `is` accepts.
    pub fn destroy(&mut self, id: Id, is: impl Fn(&Object) -> bool) -> Result<(), Status> {
        if !self.objects.get(&id).is_some_and(is) {
            return Err(status::INVALID_HANDLE);
        }
        self.objects.remove(&id);
        self.objects.retain(|_, object| !matches!(object, Object::Function(_, module) if *module == id));
        Ok(())
    }

    pub fn function(&mut self, module: Id, name: &CStr) -> Result<Id, Status> {
        let Some(Object::Module(image)) = self.objects.get(&module) else { return Err(status::INVALID_HANDLE) };
        let entry = Entry { kernel: image.kernel(name, self.settings.wave)?, _image: Rc::clone(image) };
        Ok(self.insert(Object::Function(entry, module)))
    }

    pub fn entry(&self, function: Id) -> Result<&Entry, Status> {
        match self.objects.get(&function) {
            Some(Object::Function(entry, _)) => Ok(entry),
            _ => Err(status::INVALID_HANDLE),
        }
    }

    fn stream(&mut self, id: Id) -> Result<&mut StreamState, Status> {
        match self.objects.get_mut(&id) {
            Some(Object::Stream(stream)) => Ok(stream),
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// An event's mark.
    pub fn mark(&self, event: Id) -> Result<Mark, Status> {
        match self.objects.get(&event) {
            Some(Object::Event(mark)) => Ok(*mark),
            _ => Err(status::INVALID_HANDLE),
        }
    }

    /// Whether a stream still works; it does only when a kernel hangs.
    pub fn is_hung(&mut self, stream: Id) -> Result<bool, Status> {
        let stream = self.stream(stream)?;
        if stream.capture.is_some() { Err(status::CAPTURE_UNSUPPORTED) } else { Ok(stream.hung) }
    }

    pub fn any_hung(&self) -> bool {
        self.objects.values().any(|object| matches!(object, Object::Stream(stream) if stream.hung))
    }

    // Capture

    pub fn begin_capture(&mut self, stream: Id) -> Result<(), Status> {
        let stream = self.stream(stream)?;
        if stream.capture.is_some() {
            return Err(status::ILLEGAL_STATE);
        }
        stream.capture = Some(Vec::new());
        Ok(())
    }

    pub fn end_capture(&mut self, stream: Id) -> Result<Id, Status> {
        let work = self.stream(stream)?.capture.take().ok_or(status::CAPTURE_UNMATCHED)?;
        self.create(Object::Graph(work.into()))
    }

    pub fn instantiate(&mut self, graph: Id) -> Result<Id, Status> {
        let Some(Object::Graph(work)) = self.objects.get(&graph) else { return Err(status::INVALID_HANDLE) };
        let work = Rc::clone(work);
        self.create(Object::GraphExec(work))
    }

    pub fn replay(&mut self, exec: Id, stream: Id) -> Result<(), Status> {
        let Some(Object::GraphExec(work)) = self.objects.get(&exec) else { return Err(status::INVALID_HANDLE) };
        let work = Rc::clone(work);
        work.iter().try_for_each(|work| self.queue(stream, work.clone()))
    }

    // Work

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
        let Some(Work::Copy { to, from, len }) = self.stream(stream)?.capture.as_ref().and_then(|work| work.last().cloned())
        else {
            return Ok(());
        };
        let known = self.heap.owner(to, len)?.is_some() && self.heap.owner(from, len)?.is_some();
        if known { Ok(()) } else { Err(status::CAPTURE_UNSUPPORTED) }
    }

    fn run(&mut self, stream: Id, work: Work) -> Result<(), Status> {
        match work {
            Work::Copy { to, from, len } => copy(to, from, len),
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

    /// A kernel that fails is noticed later, as on a device: by the next call.
    fn launch(&mut self, entry: &Entry, grid: [u32; 3], block: u32, shared: u32, arguments: &mut [Box<[u64]>]) {
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
            stacks: self.stacks.at_least(block as usize * usize::try_from(kernel.stack_bytes).unwrap_or(usize::MAX)),
            message: message.as_mut_ptr().cast(),
            message_bytes: message.len() as u64,
        };
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(|argument| argument.as_mut_ptr().cast()).collect();
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
struct Stacks(Vec<Page>);

#[derive(Debug, Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Stacks {
    fn at_least(&mut self, bytes: usize) -> *mut u8 {
        let pages = bytes.div_ceil(size_of::<Page>());
        if self.0.len() < pages {
            self.0 = Vec::with_capacity(pages);
        }
        self.0.as_mut_ptr().cast()
    }
}
