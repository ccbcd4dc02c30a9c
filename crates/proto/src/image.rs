//! Images in prompts: their types, judged by their content, and their limits. Pure.

use serde::{Deserialize, Serialize};

/// Maximum size of an image.
pub const MAX_IMAGE_BYTES: usize = 5_000_000;

/// Maximum number of images of a prompt.
pub const MAX_IMAGES: usize = 8;

/// Maximum size of all images of a prompt. In base64 they fit into a model request of 32 MiB.
pub const MAX_IMAGES_BYTES: usize = 16_000_000;

/// Maximum width and height in pixels; model services refuse larger images.
pub const MAX_IMAGE_SIDE: u32 = 8_000;

/// A type of image that agents take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ImageType {
    /// A PNG image.
    #[serde(rename = "image/png")]
    Png,
    /// A JPEG image.
    #[serde(rename = "image/jpeg")]
    Jpeg,
    /// A GIF image.
    #[serde(rename = "image/gif")]
    Gif,
    /// A WebP image.
    #[serde(rename = "image/webp")]
    Webp,
}

impl ImageType {
    /// The media type.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Gif => "image/gif",
            Self::Webp => "image/webp",
        }
    }

    /// The usual end of a file name, without the dot.
    #[must_use]
    pub const fn extension(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpg",
            Self::Gif => "gif",
            Self::Webp => "webp",
        }
    }

    /// Judges a file by its content, from its first to its last byte.
    ///
    /// # Errors
    /// When it is not such an image, or incomplete, or too large.
    pub fn of(bytes: &[u8]) -> Result<Self, ImageError> {
        if bytes.len() > MAX_IMAGE_BYTES {
            return Err(ImageError::TooLong { bytes: bytes.len() });
        }
        let (kind, size) = if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
            (Self::Png, png(bytes))
        } else if bytes.starts_with(b"\xff\xd8\xff") {
            (Self::Jpeg, jpeg(bytes))
        } else if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
            (Self::Gif, gif(bytes))
        } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            (Self::Webp, webp(bytes))
        } else {
            return Err(ImageError::UnknownType);
        };
        let (width, height) = size.ok_or(ImageError::Damaged { kind })?;
        if width == 0 || height == 0 {
            return Err(ImageError::Damaged { kind });
        }
        if width > MAX_IMAGE_SIDE || height > MAX_IMAGE_SIDE {
            return Err(ImageError::TooWide { width, height });
        }
        Ok(kind)
    }
}

/// Why a file is not an image for a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// No type that agents take.
    #[error("it is not a PNG, JPEG, GIF or WebP image")]
    UnknownType,
    /// Cut off, or not what its first bytes say.
    #[error("it is a damaged or incomplete {} file", .kind.as_str())]
    Damaged {
        /// What its first bytes say.
        kind: ImageType,
    },
    /// Too many bytes.
    #[error("it has {bytes} bytes; at most {MAX_IMAGE_BYTES} are possible")]
    TooLong {
        /// Its size.
        bytes: usize,
    },
    /// Too many pixels.
    #[error(
        "it has {width} × {height} pixels; at most {MAX_IMAGE_SIDE} × {MAX_IMAGE_SIDE} are possible"
    )]
    TooWide {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
    },
}

fn big(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn big16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_be_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?).into())
}

fn little16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?).into())
}

// Chunks of length, name, data and checksum, from IHDR to IEND.
fn png(bytes: &[u8]) -> Option<(u32, u32)> {
    if bytes.get(12..16)? != b"IHDR" {
        return None;
    }
    let mut at = 8usize;
    loop {
        let next = at.checked_add(big(bytes, at)? as usize)?.checked_add(12)?;
        if bytes.len() < next {
            return None;
        }
        if bytes.get(at + 4..at + 8)? == b"IEND" {
            return Some((big(bytes, 16)?, big(bytes, 20)?));
        }
        at = next;
    }
}

// Segments of a marker and a length, up to the compressed data, which ends with a marker.
fn jpeg(bytes: &[u8]) -> Option<(u32, u32)> {
    let (mut at, mut size) = (2usize, None);
    loop {
        let &[0xff, marker] = bytes.get(at..at + 2)? else { return None };
        match marker {
            // Fill bytes and markers without a length.
            0xff => at += 1,
            0x01 | 0xd0..=0xd7 => at += 2,
            0xda => break,
            _ => {
                // The frame; the other three of the range are tables.
                if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
                    size = Some((big16(bytes, at + 7)?, big16(bytes, at + 5)?));
                }
                at = at.checked_add(2 + big16(bytes, at + 2)? as usize)?;
            }
        }
    }
    // Some cameras append data after the end.
    let ended = bytes.get(at..)?.windows(2).any(|pair| pair == [0xff, 0xd9]);
    size.filter(|_| ended)
}

fn gif(bytes: &[u8]) -> Option<(u32, u32)> {
    let size = (little16(bytes, 6)?, little16(bytes, 8)?);
    let data = bytes.get(13..)?;
    // Zero bytes may follow the trailer.
    let last = data.iter().rev().find(|byte| **byte != 0);
    (last == Some(&0x3b)).then_some(size)
}

fn webp(bytes: &[u8]) -> Option<(u32, u32)> {
    let length = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?) as usize;
    if bytes.len() < length.checked_add(8)? {
        return None;
    }
    let three = |at: usize| -> Option<u32> {
        let part = bytes.get(at..at + 3)?;
        Some(u32::from_le_bytes([part[0], part[1], part[2], 0]) + 1)
    };
    match bytes.get(12..16)? {
        b"VP8 " => Some((little16(bytes, 26)? & 0x3fff, little16(bytes, 28)? & 0x3fff)),
        b"VP8L" => {
            let bits = u32::from_le_bytes(bytes.get(21..25)?.try_into().ok()?);
            Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => Some((three(24)?, three(27)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    use proptest::prelude::*;

    use super::*;

    // Each has one pixel.
    const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    const GIF: &str = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
    const WEBP: &str = "UklGRhoAAABXRUJQVlA4TA0AAAAvAAAAEAcQERGIiP4HAA==";

    fn decode(text: &str) -> Vec<u8> {
        BASE64_STANDARD.decode(text).unwrap()
    }

    fn jpeg_file(width: u16, height: u16) -> Vec<u8> {
        let mut file = vec![0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 1, 0xff, 0xc0, 0, 11, 8];
        file.extend(height.to_be_bytes());
        file.extend(width.to_be_bytes());
        file.extend([1, 1, 0x11, 0, 0xff, 0xda, 0, 2, 1, 2, 3, 0xff, 0xd9]);
        file
    }

    #[test]
    fn type_follows_from_the_content() {
        for (file, kind) in [
            (decode(PNG), ImageType::Png),
            (decode(GIF), ImageType::Gif),
            (decode(WEBP), ImageType::Webp),
            (jpeg_file(1, 1), ImageType::Jpeg),
        ] {
            assert_eq!(ImageType::of(&file), Ok(kind));
            for length in kind.extension().len() + 10..file.len() - 1 {
                let cut = ImageType::of(&file[..length]);
                assert!(cut.is_err(), "{kind:?} cut at {length} of {}", file.len());
            }
        }
        assert_eq!(ImageType::of(b"#!/bin/sh\n"), Err(ImageError::UnknownType));
        assert_eq!(ImageType::of(b""), Err(ImageError::UnknownType));
    }

    #[test]
    fn huge_images_are_refused() {
        let wide = ImageType::of(&jpeg_file(9_000, 1));
        assert_eq!(wide, Err(ImageError::TooWide { width: 9_000, height: 1 }));
        let empty = ImageType::of(&jpeg_file(0, 1));
        assert_eq!(empty, Err(ImageError::Damaged { kind: ImageType::Jpeg }));
        let mut bomb = decode(PNG);
        bomb[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(matches!(ImageType::of(&bomb), Err(ImageError::TooWide { .. })));
        let long = vec![0; MAX_IMAGE_BYTES + 1];
        assert_eq!(ImageType::of(&long), Err(ImageError::TooLong { bytes: MAX_IMAGE_BYTES + 1 }));
    }

    proptest! {
        #[test]
        fn arbitrary_files_never_panic(
            start in prop::sample::select(vec![PNG, GIF, WEBP, "/9j/"]),
            cut in 0usize..40,
            rest in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut file = decode(start);
            file.truncate(cut);
            file.extend(rest);
            let _any = ImageType::of(&file);
        }
    }
}
