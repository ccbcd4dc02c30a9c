//! Images of prompts: checked by their content before they are stored.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_proto::{
    PromptId, SessionId,
    api::{Attachment, CreateAttachment},
    image::{ImageType, MAX_IMAGES, MAX_IMAGES_BYTES},
};
use harvest_store::NewAttachment;

use super::Sessions;
use crate::error::SessionError;

impl Sessions {
    /// An image of a prompt, with its type; the first one has number 1.
    ///
    /// # Errors
    /// When there is no such image.
    pub async fn attachment(
        &self,
        session: &SessionId,
        prompt: &PromptId,
        number: u32,
    ) -> Result<(ImageType, Vec<u8>), SessionError> {
        let base64 = self.shared.store.attachment_get(session, prompt, number).await?;
        let bytes = BASE64_STANDARD.decode(base64).unwrap_or_default();
        let kind = ImageType::of(&bytes).map_err(|error| invalid(number as usize, error))?;
        Ok((kind, bytes))
    }
}

/// Checks the images of a new prompt.
pub(super) fn check(all: Vec<CreateAttachment>) -> Result<Vec<NewAttachment>, SessionError> {
    if all.len() > MAX_IMAGES {
        let what = format!("{} attachments; at most {MAX_IMAGES} are possible", all.len());
        return Err(SessionError::invalid("invalid_attachment", what));
    }
    let checked = all.into_iter().enumerate().map(|(index, one)| check_one(index + 1, one));
    let checked = checked.collect::<Result<Vec<_>, _>>()?;
    let bytes: u64 = checked.iter().map(|one| one.info.bytes).sum();
    if bytes > MAX_IMAGES_BYTES as u64 {
        let what = format!(
            "the attachments have {bytes} bytes; at most {MAX_IMAGES_BYTES} in all are possible"
        );
        return Err(SessionError::invalid("invalid_attachment", what));
    }
    Ok(checked)
}

fn check_one(number: usize, one: CreateAttachment) -> Result<NewAttachment, SessionError> {
    let CreateAttachment { media_type, data } = one;
    let bytes = BASE64_STANDARD.decode(&data);
    let bytes = bytes.map_err(|_| invalid(number, "its data is not base64"))?;
    let found = ImageType::of(&bytes).map_err(|error| invalid(number, error))?;
    if found != media_type {
        let (named, found) = (media_type.as_str(), found.as_str());
        return Err(invalid(number, format!("its type is {found}, not {named}")));
    }
    Ok(NewAttachment { info: Attachment { media_type, bytes: bytes.len() as u64 }, base64: data })
}

fn invalid(number: usize, why: impl std::fmt::Display) -> SessionError {
    SessionError::invalid("invalid_attachment", format!("attachment {number}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIF: &str = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";

    fn image(media_type: ImageType, data: &str) -> CreateAttachment {
        CreateAttachment { media_type, data: data.to_owned() }
    }

    #[test]
    fn attachments_are_judged_by_their_content() {
        let refused = |all: &[CreateAttachment]| match check(all.to_vec()) {
            Ok(checked) => format!("{} accepted", checked.len()),
            Err(error) => error.to_string(),
        };
        let gif = image(ImageType::Gif, GIF);
        assert_eq!(refused(&vec![gif.clone(); MAX_IMAGES]), "8 accepted");
        assert!(refused(&vec![gif.clone(); MAX_IMAGES + 1]).contains("at most 8"));
        let wrong = refused(&[gif, image(ImageType::Png, GIF)]);
        assert!(wrong.ends_with("attachment 2: its type is image/gif, not image/png"), "{wrong}");
        assert!(refused(&[image(ImageType::Gif, "?")]).ends_with("its data is not base64"));
        let cut = refused(&[image(ImageType::Gif, &GIF[..48])]);
        assert!(cut.ends_with("damaged or incomplete image/gif file"), "{cut}");
        assert!(refused(&[image(ImageType::Png, "aGk=")]).contains("not a PNG, JPEG, GIF or WebP"));
    }
}
