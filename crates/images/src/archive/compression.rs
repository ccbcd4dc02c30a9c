//! Decompresses an archive. Detects the compression from the first bytes, not from a file name.

use std::io::{self, BufReader, Cursor, Read};

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

use super::ArchiveError;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Decompresses `source`; returns it unchanged when it is not compressed.
pub(crate) fn decompressed<'a>(
    mut source: impl Read + 'a,
) -> Result<Box<dyn Read + 'a>, ArchiveError> {
    let mut head = Vec::new();
    (&mut source).take(6).read_to_end(&mut head).map_err(ArchiveError::Read)?;
    let known = |magic: &[u8]| head.starts_with(magic);
    // Skippable zstd frames have 16 magic numbers.
    let skippable = head.len() >= 4 && head[0] & 0xf0 == 0x50 && head[1..4] == [0x2a, 0x4d, 0x18];
    if known(&[0xfd, b'7', b'z', b'X', b'Z']) {
        return Err(ArchiveError::Compression("xz"));
    }
    if known(b"BZh") {
        return Err(ArchiveError::Compression("bzip2"));
    }
    let (gzip, zstd) = (known(GZIP), known(ZSTD) || skippable);
    let whole = BufReader::with_capacity(1 << 16, Cursor::new(head).chain(source));
    Ok(match (gzip, zstd) {
        (true, _) => Box::new(MultiGzDecoder::new(whole)),
        (_, true) => {
            Box::new(Zstd { source: whole, decoder: FrameDecoder::new(), in_frame: false })
        }
        _ => Box::new(whole),
    })
}

/// Decodes a sequence of zstd frames and checks their checksums; `FrameDecoder` decodes single
/// ones.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: io::BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame {
                if self.source.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.begin_frame()?;
                continue;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.source, one).map_err(invalid)?;
            }
            let length = self.decoder.read(buffer)?;
            if length > 0 || buffer.is_empty() {
                return Ok(length);
            }
            self.end_frame()?;
        }
    }
}

impl<R: io::BufRead> Zstd<R> {
    fn begin_frame(&mut self) -> io::Result<()> {
        match self.decoder.init(&mut self.source) {
            Ok(()) => self.in_frame = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let length = u64::from(length);
                if io::copy(&mut (&mut self.source).take(length), &mut io::sink())? != length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(error) => return Err(invalid(error)),
        }
        Ok(())
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.in_frame = false;
        let expected = self.decoder.get_checksum_from_data();
        match expected.is_some() && expected != self.decoder.get_calculated_checksum() {
            true => Err(io::Error::new(io::ErrorKind::InvalidData, "the zstd checksum is wrong")),
            false => Ok(()),
        }
    }
}

fn invalid(error: FrameDecoderError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
