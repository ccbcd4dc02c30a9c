//! Images of a prompt, as agents take them.

use std::io::{self, Read};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_proto::{
    bridge::ImageFile,
    image::{ImageType, MAX_IMAGE_BYTES, MAX_IMAGES_BYTES},
};

use crate::{files::blocking_io, resolve, users::User};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    /// Of the file in the sandbox.
    pub(crate) path: String,
    pub(crate) media_type: ImageType,
    pub(crate) base64: String,
}

/// Reads the images of a prompt with the access of the agent's user, who may have replaced them.
pub(crate) async fn load(user: &User, files: &[ImageFile]) -> io::Result<Vec<Image>> {
    let mut images = Vec::new();
    let mut left = MAX_IMAGES_BYTES;
    for ImageFile { path, media_type } in files {
        let (user, file) = (user.clone(), path.clone());
        let read = move || {
            let mut bytes = Vec::new();
            let file = resolve::open_regular(file.as_ref())?;
            file.take(MAX_IMAGE_BYTES.min(left) as u64).read_to_end(&mut bytes)?;
            Ok((bytes.len(), BASE64_STANDARD.encode(bytes)))
        };
        let (bytes, base64) = blocking_io(move || user.access(read)).await?;
        left -= bytes;
        images.push(Image { path: path.clone(), media_type: *media_type, base64 });
    }
    Ok(images)
}

/// The text of a prompt for an agent that takes no images: it can look at the files.
pub(super) fn named_in(text: &str, images: &[Image]) -> String {
    let paths = images.iter().map(|image| format!("\n- {}", image.path));
    match images {
        [] => text.to_owned(),
        _ => format!("{text}\n\nThe user attached these images:{}", paths.collect::<String>()),
    }
}
