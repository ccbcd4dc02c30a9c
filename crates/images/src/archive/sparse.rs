//! Parses the maps of sparse files: where the stored bytes belong. GNU tar has four formats. Pure.

use super::{
    ArchiveError,
    header::{BLOCK, number},
    pax::decimal,
};

// 16 MB of map; a file in more pieces is an attack on memory.
const MAX_EXTENTS: usize = 1 << 20;

/// A range of a file whose bytes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

type Block = [u8; BLOCK];

/// Whether a map is sorted, within the file, and needs exactly the stored bytes.
pub(super) fn fits(extents: &[Extent], stored: u64, size: u64) -> bool {
    let mut end = 0u64;
    let mut sum = 0u64;
    for extent in extents {
        let Some(next) = extent.offset.checked_add(extent.length) else { return false };
        if extent.offset < end || next > size {
            return false;
        }
        (end, sum) = (next, sum + extent.length);
    }
    sum == stored && size <= i64::MAX as u64
}

/// The map in an `S` header and the blocks after it, with the file's size. `None` when malformed.
pub(super) fn header_map(
    block: &Block,
    more: &mut dyn FnMut() -> Result<Block, ArchiveError>,
) -> Result<Option<(Vec<Extent>, u64)>, ArchiveError> {
    let mut extents = Vec::new();
    let mut valid = header_pairs(&block[386..482], &mut extents);
    let mut continued = block[482] != 0;
    while continued && valid {
        let next = more()?;
        valid = header_pairs(&next[..504], &mut extents);
        continued = next[504] != 0;
    }
    let size = number(&block[483..495]).and_then(|size| u64::try_from(size).ok());
    Ok(size.filter(|_| valid).map(|size| (extents, size)))
}

fn header_pairs(bytes: &[u8], extents: &mut Vec<Extent>) -> bool {
    for pair in bytes.chunks_exact(24) {
        // An empty field ends the list.
        if pair[..12].iter().all(|byte| *byte == 0) || extents.len() >= MAX_EXTENTS {
            return extents.len() < MAX_EXTENTS;
        }
        let natural = |field: &[u8]| number(field).and_then(|value| u64::try_from(value).ok());
        let (Some(offset), Some(length)) = (natural(&pair[..12]), natural(&pair[12..])) else {
            return false;
        };
        extents.push(Extent { offset, length });
    }
    true
}

/// The map in the first blocks of the content: decimal lines, preceded by the number of extents.
pub(super) fn content_map(
    more: &mut dyn FnMut() -> Result<Block, ArchiveError>,
) -> Result<Option<Vec<Extent>>, ArchiveError> {
    let mut numbers: Vec<u64> = Vec::new();
    let mut wanted = 1;
    let mut line = Vec::new();
    while numbers.len() < wanted {
        for byte in more()? {
            if numbers.len() == wanted {
                break;
            }
            if byte != b'\n' {
                line.push(byte);
                if line.len() > 20 {
                    return Ok(None);
                }
                continue;
            }
            let Some(number) = decimal(&line) else { return Ok(None) };
            line.clear();
            if numbers.is_empty() {
                let Some(count) =
                    usize::try_from(number).ok().filter(|count| *count <= MAX_EXTENTS)
                else {
                    return Ok(None);
                };
                wanted = 1 + 2 * count;
            }
            numbers.push(number);
        }
    }
    let pairs = numbers[1..].chunks_exact(2);
    Ok(Some(pairs.map(|pair| Extent { offset: pair[0], length: pair[1] }).collect()))
}

/// The sparse map in pax records.
#[derive(Debug, Default)]
pub(super) struct SparseMap {
    pub(super) name: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// Offsets and lengths, alternating.
    numbers: Option<Vec<u64>>,
}

impl SparseMap {
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        match key {
            b"name" => self.name = Some(super::pax::name(value).ok()?),
            b"size" | b"realsize" => self.size = Some(decimal(value)?),
            b"offset" | b"numbytes" => self.numbers.get_or_insert_default().push(decimal(value)?),
            b"map" => {
                let numbers =
                    value.split(|byte| *byte == b',').filter(|text| !text.is_empty()).map(decimal);
                self.numbers = Some(numbers.collect::<Option<_>>()?);
            }
            _ => {}
        }
        Some(())
    }

    /// The map; `None` when it is in the content.
    pub(super) fn extents(&self) -> Option<Vec<Extent>> {
        let pairs = self.numbers.as_ref()?.chunks(2);
        // An offset without a length gets one that `fits` refuses.
        let extent = |pair: &[u64]| Extent {
            offset: pair[0],
            length: pair.get(1).copied().unwrap_or(u64::MAX),
        };
        Some(pairs.map(extent).collect())
    }
}
