//! What a compiled object holds: entry points and what they take of the device.

use super::msgpack::{self, Value};

/// One entry point of an object. Numbers are known where the object states them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelReport {
    /// Its name.
    pub name: String,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u64,
    /// Registers of a thread (vector registers on AMD).
    pub registers: Option<u64>,
    /// Registers that did not fit and went to memory.
    pub spills: Option<u64>,
}

/// Reads an AMD code object, PTX text, an NVIDIA cubin or a shared object of the emulated device.
///
/// # Errors
/// A sentence that says what is wrong with the object.
pub fn inspect(image: &[u8]) -> Result<Vec<KernelReport>, String> {
    if !image.starts_with(b"\x7fELF") {
        return std::str::from_utf8(image)
            .map(inspect_ptx)
            .map_err(|_| "it is neither ELF nor text".to_owned());
    }
    let elf = Elf::new(image)?;
    match elf.machine {
        Elf::AMDGPU => inspect_amd(&elf),
        Elf::CUDA => Ok(named(
            elf.symbols()?.into_iter().filter(|symbol| symbol.is_cuda_entry).map(|symbol| symbol.name),
        )),
        _ => Ok(named(
            elf.symbols()?
                .iter()
                .filter_map(|symbol| symbol.name.strip_suffix("_emulated").map(str::to_owned)),
        )),
    }
}

fn named(names: impl Iterator<Item = String>) -> Vec<KernelReport> {
    names.map(|name| KernelReport { name, shared_bytes: 0, registers: None, spills: None }).collect()
}

/// Entry points and shared arrays of assembly text as clang prints it: `.visible .entry name(` and
/// `.shared .align 4 .b8 name[128];`.
/// Arrays stand in the entry point that has them, or in front of all of them.
fn inspect_ptx(text: &str) -> Vec<KernelReport> {
    let (mut reports, mut of_all): (Vec<KernelReport>, u64) = (Vec::new(), 0);
    for line in text.lines().map(str::trim_start) {
        if let Some(name) = line.strip_prefix(".visible .entry ").and_then(|rest| rest.split('(').next()) {
            let name = name.to_owned();
            reports.push(KernelReport { name, shared_bytes: of_all, registers: None, spills: None });
        } else if line.starts_with(".shared") {
            let bytes = line.split('[').nth(1).and_then(|rest| rest.split(']').next()?.parse::<u64>().ok());
            let total = reports.last_mut().map_or(&mut of_all, |report| &mut report.shared_bytes);
            *total += bytes.unwrap_or(0);
        }
    }
    reports
}

/// The metadata note of an AMD code object (version 3 and later): a MessagePack map.
fn inspect_amd(elf: &Elf<'_>) -> Result<Vec<KernelReport>, String> {
    const OWNER: &[u8] = b"AMDGPU\0";
    const METADATA: u32 = 32;
    let note = elf.notes()?.into_iter().find(|note| note.owner == OWNER && note.kind == METADATA);
    let metadata = msgpack::read(note.ok_or("it has no AMDGPU metadata note")?.content)?;
    let Some(Value::Array(kernels)) = metadata.get("amdhsa.kernels") else {
        return Err("its metadata lists no kernels".to_owned());
    };
    let report = |kernel: &Value| {
        let number = |key: &str| kernel.get(key).and_then(Value::number);
        Some(KernelReport {
            name: kernel.get(".name")?.text()?.to_owned(),
            shared_bytes: number(".group_segment_fixed_size")?,
            registers: number(".vgpr_count"),
            spills: Some(number(".vgpr_spill_count")? + number(".sgpr_spill_count")?),
        })
    };
    kernels
        .iter()
        .map(report)
        .collect::<Option<_>>()
        .ok_or_else(|| "its metadata lacks a kernel's numbers".to_owned())
}

/// Bytes that are read as little-endian fields, never past their end.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn part(self, offset: usize, size: usize) -> Result<Fields<'a>, String> {
        let end = offset.checked_add(size);
        end.and_then(|end| self.0.get(offset..end)).map(Fields).ok_or_else(|| "it is cut short".to_owned())
    }

    fn array<const N: usize>(self, offset: usize) -> Result<[u8; N], String> {
        let part = self.part(offset, N)?;
        Ok(std::array::from_fn(|i| part.0[i]))
    }

    fn half(self, offset: usize) -> Result<u16, String> {
        self.array(offset).map(u16::from_le_bytes)
    }

    fn word(self, offset: usize) -> Result<u32, String> {
        self.array(offset).map(u32::from_le_bytes)
    }

    fn long(self, offset: usize) -> Result<usize, String> {
        usize::try_from(u64::from_le_bytes(self.array(offset)?)).map_err(|_| "it is cut short".to_owned())
    }
}

/// The parts of a 64-bit ELF file that say what it holds.
struct Elf<'a> {
    bytes: Fields<'a>,
    machine: u16,
}

struct Note<'a> {
    owner: &'a [u8],
    kind: u32,
    content: &'a [u8],
}

struct Symbol {
    name: String,
    is_cuda_entry: bool,
}

struct Section<'a> {
    kind: u32,
    link: usize,
    header: Fields<'a>,
}

impl<'a> Elf<'a> {
    const AMDGPU: u16 = 224;
    const CUDA: u16 = 190;
    const SYMBOL_TABLE: u32 = 2;
    const NOTE: u32 = 7;
    const DYNAMIC_SYMBOLS: u32 = 11;
    /// `STO_CUDA_ENTRY` in a symbol's `st_other`.
    const CUDA_ENTRY: u8 = 0x10;

    fn new(bytes: &'a [u8]) -> Result<Self, String> {
        let bytes = Fields(bytes);
        Ok(Self { bytes, machine: bytes.half(18)? })
    }

    fn sections(&self) -> Result<Vec<Section<'a>>, String> {
        let (table, size) = (self.bytes.long(0x28)?, usize::from(self.bytes.half(0x3a)?));
        let table = self.bytes.part(table, size * usize::from(self.bytes.half(0x3c)?))?;
        let section = |header: &'a [u8]| {
            let header = Fields(header);
            Ok(Section { kind: header.word(4)?, link: header.word(0x28)? as usize, header })
        };
        table.0.chunks_exact(size.max(1)).map(section).collect()
    }

    fn content(&self, section: &Section<'a>) -> Result<Fields<'a>, String> {
        self.bytes.part(section.header.long(0x18)?, section.header.long(0x20)?)
    }

    fn notes(&self) -> Result<Vec<Note<'a>>, String> {
        const HEADER: usize = 12;
        let mut notes = Vec::new();
        for section in self.sections()?.iter().filter(|section| section.kind == Self::NOTE) {
            let content = self.content(section)?;
            let mut at = 0;
            while at + HEADER <= content.0.len() {
                let header = content.part(at, HEADER)?;
                let (owner, size) = (header.word(0)? as usize, header.word(4)? as usize);
                let start = at + HEADER + owner.next_multiple_of(4);
                notes.push(Note {
                    owner: content.part(at + HEADER, owner)?.0,
                    kind: header.word(8)?,
                    content: content.part(start, size)?.0,
                });
                at = start + size.next_multiple_of(4);
            }
        }
        Ok(notes)
    }

    /// Defined symbols, of the dynamic table where there is one.
    fn symbols(&self) -> Result<Vec<Symbol>, String> {
        const ENTRY: usize = 24;
        let sections = self.sections()?;
        let of_kind = |kind| sections.iter().find(|section| section.kind == kind);
        let Some(table) = of_kind(Self::DYNAMIC_SYMBOLS).or_else(|| of_kind(Self::SYMBOL_TABLE)) else {
            return Err("it has no symbols".to_owned());
        };
        let names = self.content(sections.get(table.link).ok_or("it is cut short")?)?;
        let mut symbols = Vec::new();
        for symbol in self.content(table)?.0.chunks_exact(ENTRY).map(Fields) {
            let name = names.0.get(symbol.word(0)? as usize..).unwrap_or_default();
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            let [_, other] = symbol.array(4)?;
            if symbol.half(6)? != 0 {
                let is_cuda_entry = other & Self::CUDA_ENTRY != 0;
                symbols.push(Symbol { name: String::from_utf8_lossy(name).into_owned(), is_cuda_entry });
            }
        }
        Ok(symbols)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Damaged objects are refused with a reason; nothing is indexed out of bounds.
    #[test]
    fn damaged_objects_are_refused() {
        let mut elf = vec![0u8; 64];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[18] = 224;
        assert_eq!(inspect(&elf).unwrap_err(), "it has no AMDGPU metadata note");
        elf[0x28..0x30].copy_from_slice(&u64::MAX.to_le_bytes());
        elf[0x3c] = 9;
        assert_eq!(inspect(&elf).unwrap_err(), "it is cut short");
        assert_eq!(inspect(&elf[..20]).unwrap_err(), "it is cut short");
        assert_eq!(inspect(b"\xff\xfe").unwrap_err(), "it is neither ELF nor text");
    }

    #[test]
    fn assembly_text_lists_entries_and_shared_arrays() {
        let text = ".version 8.0\n.shared .align 4 .b8 a[128];\n.visible .entry one(\n\t.shared .align 4 .b8 b[64];\n.visible .entry two(\n";
        let reports = inspect(text.as_bytes()).unwrap();
        assert_eq!(reports.iter().map(|report| report.name.as_str()).collect::<Vec<_>>(), ["one", "two"]);
        assert_eq!([reports[0].shared_bytes, reports[1].shared_bytes], [192, 128]);
    }
}
