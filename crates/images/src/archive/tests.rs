//! Writes archives byte by byte for tests, and tests the reader with them.

use std::io::Write;

use super::*;

/// Writes an archive.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

/// An entry to write.
#[derive(Clone)]
pub(crate) struct Item<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) flag: u8,
    pub(crate) mode: u32,
    pub(crate) owner: u64,
    pub(crate) link: &'a [u8],
    pub(crate) data: &'a [u8],
}

impl<'a> Item<'a> {
    pub(crate) fn file(name: &'a str, data: &'a [u8]) -> Self {
        Self { name: name.as_bytes(), flag: b'0', mode: 0o644, owner: 0, link: b"", data }
    }

    pub(crate) fn folder(name: &'a str) -> Self {
        Self { flag: b'5', mode: 0o755, ..Self::file(name, b"") }
    }

    pub(crate) fn link(flag: u8, name: &'a str, to: &'a str) -> Self {
        Self { flag, link: to.as_bytes(), ..Self::file(name, b"") }
    }
}

impl Writer {
    pub(crate) fn add(mut self, item: &Item<'_>) -> Self {
        let block = header(item, item.data.len() as u64);
        self.0.extend_from_slice(&block);
        self.content(item.data);
        self
    }

    pub(crate) fn pax(self, records: &[(&str, &[u8])], item: &Item<'_>) -> Self {
        let data: Vec<u8> = records.iter().flat_map(|(key, value)| record(key, value)).collect();
        self.add(&Item { flag: b'x', ..Item::file("pax", &data) }).add(item)
    }

    pub(crate) fn content(&mut self, data: &[u8]) {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

pub(crate) fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let digits = (1..).find(|digits| (rest + digits).to_string().len() == *digits).unwrap();
    let mut bytes = format!("{} {key}=", rest + digits).into_bytes();
    bytes.extend_from_slice(value);
    bytes.push(b'\n');
    bytes
}

pub(crate) fn header(item: &Item<'_>, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let name = &item.name[..item.name.len().min(100)];
    block[..name.len()].copy_from_slice(name);
    let put = |block: &mut [u8; BLOCK], at: usize, text: String| {
        block[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    put(&mut block, 100, format!("{:07o}", item.mode));
    for at in [108, 116] {
        if item.owner < 1 << 21 {
            put(&mut block, at, format!("{:07o}", item.owner));
        } else {
            block[at..at + 8].copy_from_slice(&(item.owner | 1 << 63).to_be_bytes());
        }
    }
    put(&mut block, 124, format!("{size:011o}"));
    put(&mut block, 136, format!("{:011o}", 1_000_000_000));
    block[156] = item.flag;
    let link = &item.link[..item.link.len().min(100)];
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    block
}

pub(crate) fn seal(block: &mut [u8; BLOCK]) {
    block[148..156].copy_from_slice(b"        ");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn all(bytes: &[u8]) -> Result<Vec<Entry>, ArchiveError> {
    let mut archive = Archive::new(bytes);
    let mut entries = Vec::new();
    while let Some(entry) = archive.next()? {
        entries.push(entry);
    }
    Ok(entries)
}

#[test]
fn gnu_and_pax_records_carry_long_names() {
    let long = "d/".repeat(100) + "file";
    let name = [long.as_bytes(), b"\0"].concat();
    let bytes = Writer::default()
        .add(&Item { flag: b'L', ..Item::file("././@LongLink", &name) })
        .add(&Item::file("cut", b"1"))
        .pax(
            &[("path", long.as_bytes()), ("mtime", b"-1.5"), ("uid", b"70000")],
            &Item::file("cut", b"22"),
        )
        .end();
    let entries = all(&bytes).unwrap();
    assert_eq!(entries[0].path, long.as_bytes());
    assert_eq!((entries[1].path.as_slice(), entries[1].size), (long.as_bytes(), 2));
    assert_eq!((entries[1].modified, entries[1].uid), ((-2, 500_000_000), 70_000));
}

#[test]
fn archive_cut_at_any_byte_is_truncated() {
    let bytes = Writer::default().add(&Item::file("a", &[7; 700])).add(&Item::folder("b/")).end();
    for length in 0..bytes.len() - 2 * BLOCK {
        assert!(matches!(all(&bytes[..length]), Err(ArchiveError::Truncated)), "{length}");
    }
    assert_eq!(all(&bytes).unwrap().len(), 2);
}

#[test]
fn wrong_checksum_is_reported_with_its_offset() {
    let mut bytes = Writer::default().add(&Item::folder("a/")).add(&Item::folder("b/")).end();
    bytes[BLOCK + 1] ^= 1;
    assert!(matches!(all(&bytes), Err(ArchiveError::Checksum { at: 512 })));
    assert!(matches!(all(&[b'x'; 1024]), Err(ArchiveError::Checksum { at: 0 })));
}

#[test]
fn malformed_headers_are_refused() {
    let huge = header(&Item { flag: b'x', ..Item::file("x", b"") }, 1 << 30);
    let zero = Writer::default().pax(&[("path", b"a\0b")], &Item::file("x", b"")).end();
    let bad = Writer::default().add(&Item { flag: b'x', ..Item::file("x", b"999 a=b\n") }).end();
    let kind = Writer::default().add(&Item { flag: b'Z', ..Item::file("x", b"") }).end();
    let map = [("GNU.sparse.size", &b"10"[..]), ("GNU.sparse.map", b"0,5,3,5")];
    let sparse = Writer::default().pax(&map, &Item::file("x", b"0123456789")).end();
    for bytes in [&huge[..], &zero, &bad, &kind, &sparse] {
        assert!(matches!(all(bytes), Err(ArchiveError::Header { .. })), "{:?}", all(bytes));
    }
}

#[test]
fn numbers_are_octal_text_or_binary() {
    let number = header::number;
    assert_eq!(number(b"0000644\0"), Some(0o644));
    assert_eq!(number(b"   7 \0\0\0"), Some(7));
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 0]), Some(256));
    assert_eq!(number(&[0xff; 12]), Some(-1));
    assert_eq!(number(b"12x\0"), None);
    assert_eq!(number(&[0xbf; 12]), None);
}

#[test]
fn compression_is_detected_and_checksums_are_verified() {
    let plain = Writer::default().add(&Item::file("a", &[7; 70_000])).end();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let gzip = gzip.finish().unwrap();
    let frame = |bytes: &[u8]| {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    };
    // Two frames with a skippable frame between them.
    let skipped = [0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    let zstd = [frame(&plain[..1000]), skipped.to_vec(), frame(&plain[1000..])].concat();
    let read = |bytes: &[u8]| -> Result<Vec<u8>, ArchiveError> {
        let mut all = Vec::new();
        decompressed(bytes)?.read_to_end(&mut all).map_err(ArchiveError::Read)?;
        Ok(all)
    };
    for bytes in [&plain, &gzip, &zstd] {
        assert_eq!(read(bytes).unwrap(), plain);
    }
    for bytes in [&gzip, &zstd] {
        assert!(read(&bytes[..bytes.len() - 1]).is_err());
        let mut damaged = bytes.clone();
        let last = damaged.len() - 3;
        damaged[last] ^= 1;
        assert!(read(&damaged).is_err());
    }
    assert!(matches!(read(b"BZh91AY&SY"), Err(ArchiveError::Compression("bzip2"))));
}
