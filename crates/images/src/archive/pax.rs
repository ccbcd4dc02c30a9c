//! Parses the records of a pax header: a sequence of `length key=value`. Pure.

use super::sparse::SparseMap;

/// The fields that pax records override in the header that follows them.
#[derive(Debug, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) modified: Option<(i64, u32)>,
    pub(super) capability: Option<Vec<u8>>,
    pub(super) attributes: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) sparse: Option<SparseMap>,
}

impl Pax {
    pub(super) fn parse(mut bytes: &[u8]) -> Result<Self, &'static str> {
        let mut pax = Self::default();
        while !bytes.is_empty() {
            let (key, value, rest) = record(bytes).ok_or("its records are malformed")?;
            pax.set(key, value)?;
            bytes = rest;
        }
        Ok(pax)
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        match key {
            b"path" => self.path = Some(name(value)?),
            b"linkpath" => self.link = Some(name(value)?),
            b"size" => self.size = Some(natural(value)?),
            b"uid" => self.uid = Some(natural(value)?),
            b"gid" => self.gid = Some(natural(value)?),
            b"mtime" => self.modified = Some(time(value).ok_or("its time is not a number")?),
            b"SCHILY.xattr.security.capability" => self.capability = Some(value.to_vec()),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.attributes.push((name.to_vec(), value.to_vec()));
                } else if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    let map = self.sparse.get_or_insert_default();
                    map.set(key, value).ok_or("its sparse map is malformed")?;
                }
            }
        }
        Ok(())
    }
}

fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let blank = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&bytes[..blank])?).ok()?;
    let record = bytes.get(blank + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], &bytes[length..]))
}

// A field of a header ends at its first zero; a record has an explicit length and needs none.
pub(super) fn name(value: &[u8]) -> Result<Vec<u8>, &'static str> {
    if value.is_empty() || value.contains(&0) {
        Err("a name is empty or contains a zero byte")
    } else {
        Ok(value.to_vec())
    }
}

fn natural(value: &[u8]) -> Result<u64, &'static str> {
    decimal(value).ok_or("a value is not a number")
}

/// A number of decimal digits only.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digits = text.iter().all(u8::is_ascii_digit) && !text.is_empty();
    digits.then(|| std::str::from_utf8(text).ok()?.parse().ok()).flatten()
}

// `-12.5` is 12.5 seconds before the epoch.
fn time(value: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    if !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let seconds: i64 = whole.parse().ok()?;
    let nanos: u32 = format!("{part:0<9.9}").parse().ok()?;
    match whole.starts_with('-') && nanos > 0 {
        true => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos)),
        false => Some((seconds, nanos)),
    }
}
