"""Downloads by the ``ogb`` package, without what it does with the files afterwards, which takes all of the memory."""

import shutil
from pathlib import Path

from joestar.data import ogb
from joestar.errors import DataError

MAG = "mag240m"


def download(name: str, root: Path) -> Path:
    """The folder of ``ogb:NAME`` under ``root``, downloaded by the package if it is not there.

    Raises:
        DataError: the package is missing, the name is none of its graphs of nodes, or the download failed.
    """
    called = name.removeprefix("ogb:")
    if called == MAG:
        found = root / "mag240m_kddcup2021"
        return found if found.is_dir() else _made(name, lambda: _mag(root), found)
    if not called.startswith("ogbn-"):
        raise DataError(f"{name}: expected a dataset for nodes, such as ogb:ogbn-products, or ogb:{MAG}.")
    there = [root / other for other in ogb.folder_names(called) if ogb.is_ogb(root / other)]
    return there[0] if there else _made(name, lambda: _nodes(called, root), root / ogb.folder_names(called)[0])


def _nodes(name: str, root: Path) -> None:
    from ogb.nodeproppred import NodePropPredDataset
    from ogb.utils.url import decide_download, download_url, extract_zip

    class Files(NodePropPredDataset):
        """Its ``pre_process`` as far as the files are on disk."""

        def pre_process(self) -> None:
            meta = self.meta_info.get(self.name, self.meta_info)
            if not decide_download(meta["url"]):
                raise OSError("the download was declined")
            packed = Path(download_url(meta["url"], self.original_root))
            extract_zip(str(packed), self.original_root)
            packed.unlink()
            shutil.move(Path(self.original_root) / self.download_name, self.root)

    Files(name, str(root))


def _mag(root: Path) -> None:
    from ogb.lsc import MAG240MDataset

    class Files(MAG240MDataset):
        """Without the reading of what was downloaded."""

        def __init__(self, folder: Path):
            self.root, self.dir = str(folder), str(folder / "mag240m_kddcup2021")
            self.download()

    Files(root)


def _made(name: str, make, folder: Path) -> Path:
    try:
        make()
    except ImportError:
        raise DataError(
            f"{name}: it is downloaded by the package ogb, which is not installed: pip install joestar[ogb]. Files "
            "that are on disk already need no package: give their folder."
        ) from None
    except KeyboardInterrupt:
        raise
    except (SystemExit, Exception) as error:  # ogb exits where a download is declined
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{name}: it could not be downloaded to {folder.parent} ({type(error).__name__}: {said[0]}). Is the name "
            "right, and is there a network, space and permission? Another folder: --root (root=...)."
        ) from error
    if not folder.is_dir():
        raise DataError(f"{name}: the package ogb has not made the folder {folder}; give the one that it has made.")
    return folder
