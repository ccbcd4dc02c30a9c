//! Maps of sparse files: which stored bytes belong where. GNU wrote them in four ways. Pure.

use super::{
    ArchiveError,
    header::{BLOCK, number},
    pax::decimal,
};

// 16 MB of map; a file in more pieces than that is an attack on our memory.
const MAX_EXTENTS: usize = 1 << 20;

/// Stored bytes that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

type Block = [u8; BLOCK];

/// Whether a map is in order, within the file, and needs exactly the bytes that are stored.
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

/// The map in an `S` header and the blocks behind it, with the file's size. `None` when it makes no sense.
pub(super) fn old_map(
    block: &Block,
    more: &mut dyn FnMut() -> Result<Block, ArchiveError>,
) -> Result<Option<(Vec<Extent>, u64)>, ArchiveError> {
    let mut extents = Vec::new();
    let mut good = old_pairs(&block[386..482], &mut extents);
    let mut goes_on = block[482] != 0;
    while goes_on && good {
        let next = more()?;
        good = old_pairs(&next[..504], &mut extents);
        goes_on = next[504] != 0;
    }
    let size = number(&block[483..495]).and_then(|size| u64::try_from(size).ok());
    Ok(size.filter(|_| good).map(|size| (extents, size)))
}

fn old_pairs(bytes: &[u8], extents: &mut Vec<Extent>) -> bool {
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

/// The map in the first blocks of the content: decimal lines, their count first.
pub(super) fn leading_map(
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

/// What pax records say about holes.
#[derive(Debug, Default)]
pub(super) struct SparseMap {
    pub(super) name: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// Offsets and lengths in turn.
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

    /// The map, unless it is in the content.
    pub(super) fn extents(&self) -> Option<Vec<Extent>> {
        let pairs = self.numbers.as_ref()?.chunks(2);
        // A number too many is a length that fits nothing.
        let extent = |pair: &[u64]| Extent {
            offset: pair[0],
            length: pair.get(1).copied().unwrap_or(u64::MAX),
        };
        Some(pairs.map(extent).collect())
    }
}
