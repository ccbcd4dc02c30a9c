//! Images for a prompt: files of this computer, judged by their content.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context, Result};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_proto::{
    api::CreateAttachment,
    image::{ImageType, MAX_IMAGE_BYTES},
};

use crate::printer::Advice;

/// Reads the files of `--attach`.
pub(crate) fn read(files: &[std::path::PathBuf]) -> Result<Vec<CreateAttachment>> {
    files.iter().map(|file| read_one(file)).collect()
}

fn read_one(path: &Path) -> Result<CreateAttachment> {
    let mut bytes = Vec::new();
    let read = File::open(path)
        .and_then(|file| file.take(MAX_IMAGE_BYTES as u64 + 1).read_to_end(&mut bytes));
    read.with_context(|| format!("cannot read the attachment {}", path.display()))?;
    let media_type = ImageType::of(&bytes).map_err(|error| {
        let what = format!("cannot attach {}: {error}", path.display());
        Advice::new(what, "attach a PNG, JPEG, GIF or WebP image of at most 5 MB")
    })?;
    Ok(CreateAttachment { media_type, data: BASE64_STANDARD.encode(bytes) })
}
