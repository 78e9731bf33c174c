/** Files may be dropped anywhere on the page. */
import { useEffect, useState } from 'preact/hooks'
import { importFiles } from './files'

const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes('Files') ?? false

export function DropTarget() {
  const [isOver, setOver] = useState(false)
  useEffect(() => {
    const over = (event: DragEvent) => {
      if (!hasFiles(event)) return
      event.preventDefault()
      setOver(true)
    }
    const leave = (event: DragEvent) => {
      if (event.relatedTarget === null) setOver(false)
    }
    const drop = (event: DragEvent) => {
      setOver(false)
      if (!hasFiles(event)) return
      event.preventDefault()
      void importFiles([...event.dataTransfer!.files])
    }
    addEventListener('dragover', over)
    addEventListener('dragleave', leave)
    addEventListener('drop', drop)
    return () => {
      removeEventListener('dragover', over)
      removeEventListener('dragleave', leave)
      removeEventListener('drop', drop)
    }
  }, [])
  return isOver ? <div class="drop-anywhere">Drop the file to import it.</div> : null
}
